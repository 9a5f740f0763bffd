"""Statistics of reports, computed again by a script that knows nothing of the package."""

from pathlib import Path

import check_statistics
import pytest
from synthetic import leave_seeds

from fusion_bench_featcal.lab.report.differences import against, row_name
from fusion_bench_featcal.results.long_table import AVERAGE
from fusion_bench_featcal.results.report import summarise

RUNS = Path(__file__).parents[1] / "golden" / "data" / "runs"
ONE_SEED = sorted((RUNS / "compare42").glob("*/"))
TWO_SEEDS = ONE_SEED + sorted((RUNS / "compare43").glob("*/"))


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_statistics_are_those_of_the_flags(seeds: int, tmp_path: Path):
    runs = [ONE_SEED, TWO_SEEDS, leave_seeds(tmp_path)][seeds - 1]
    summary, again = summarise(runs), check_statistics.read(runs)
    for row in summary.rows:
        name = row_name((row.suite, row.upstream, row.name))
        average, gain, low, high = check_statistics.gain(
            again[name], again[row.upstream if row.is_repair else name]
        )
        assert row.accuracy[AVERAGE] == pytest.approx(average, abs=1e-9)
        if row.is_repair and row.gain_interval:
            interval = row.gain_interval
            found = (row.gain, interval.low, interval.high)
            assert found == pytest.approx((gain, low, high), abs=1e-6), name
    reference = "task_arithmetic/featcal"
    wanted = check_statistics.against(again, reference)
    differences = against(summary.scores, reference)
    assert {row_name(each.row) for each in differences} == set(wanted)
    for each in differences:
        interval = each.interval
        values = (interval.estimate, interval.low, interval.high, each.p, each.adjusted)
        # Rows in another order are drawn otherwise.
        assert values == pytest.approx(wanted[row_name(each.row)], abs=0.01), each.row
