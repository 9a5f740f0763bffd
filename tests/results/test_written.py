"""Written tables, read again without their runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from html_pages import Reader, page_text
from synthetic import leave_run, leave_seeds, make_report

from fusion_bench_featcal.json_files import json_text
from fusion_bench_featcal.results import ReportError
from fusion_bench_featcal.results.find import FailedCell, find
from fusion_bench_featcal.results.html import write_page
from fusion_bench_featcal.results.summary import Summary, summarise
from fusion_bench_featcal.results.views import write_combined, write_side_by_side
from fusion_bench_featcal.results.written import load_table

WRITERS = [write_combined, write_side_by_side]


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    runs = leave_seeds(tmp_path / "runs")
    failed = [FailedCell(upstream="task_arithmetic", name="surgery", reason="out of memory")]
    return summarise(runs, failed)


@pytest.mark.parametrize("write", WRITERS)
def test_rows_are_those_that_were_written(write: Callable[..., Path], summary: Summary, tmp_path):
    table = load_table(write(summary, tmp_path / "table").parent)
    assert [row.name for row in table.rows] == [row.name for row in summary.displayed("toy")]
    for row in table.rows:
        (before,) = [old for old in summary.rows if old.name == row.name]
        assert (row.accuracy, row.deviation, row.gain) == (
            before.accuracy, before.deviation, before.gain,
        )  # fmt: skip
        assert row.gain_interval == before.gain_interval
        assert len(row.run_seeds) == len(before.run_seeds) == 3
        assert row.worst == before.worst
    assert table.failed == (summary.failed if write is write_side_by_side else [])


@pytest.mark.parametrize("write", WRITERS)
def test_a_page_of_tables_whose_runs_are_gone(
    write: Callable[..., Path], summary: Summary, tmp_path: Path
):
    folder = write(summary, tmp_path / "table").parent
    shutil.rmtree(tmp_path / "runs")
    page = Reader(page_text(folder))
    cell = page.table("mean over 3 runs ± half of its 95 % interval")["featcal"]["average"]
    assert cell["text"] == "75.0 ± 12.4"
    assert page.texts("li")[0].startswith(
        "made from written tables" if write is write_combined else "task_arithmetic, surgery failed"
    )
    ids = [element["id"] for element in page.all("section")]
    assert "figures" in ids and "settings" not in ids and "data" not in ids


def test_tables_beside_their_runs_are_not_shown_twice(summary: Summary, tmp_path: Path):
    write_combined(summary, tmp_path / "table")
    found = find([tmp_path], tables=True)
    assert len(found.runs) == 3 and len(found.tables) == 1
    page = Reader(page_text(tmp_path))
    assert len([text for text in page.texts("h3") if "accuracy in per cent" in text]) == 1
    with pytest.raises(ReportError, match="no run in or below"):
        find([tmp_path / "table"])


def test_a_table_without_rows_has_no_page(summary: Summary, tmp_path: Path):
    path = write_side_by_side(summary, tmp_path / "table")
    path.write_text(json_text({**_content(path), "rows": []}))
    with pytest.raises(ReportError, match=r"no row to show in .*table"):
        write_page(tmp_path / "page.html", find([path.parent], tables=True), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 7}, "has schema 7"),
        ({"kind": "run"}, "is not a comparison"),
        ({"rows": [{"suite": "toy"}]}, r"rows\[0\]: no upstream"),
        ({"rows": 3}, "rows must be a list"),
        ({"notes": [3]}, r"notes\[0\] must be str"),
    ],
)
def test_damage_is_named(summary: Summary, tmp_path: Path, change: dict[str, Any], message: str):
    path = write_combined(summary, tmp_path / "table")
    path.write_text(json_text({**_content(path), **change}))
    with pytest.raises(ReportError, match=message):
        load_table(path.parent)


def _content(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_notes_name_their_merger_where_there_are_several(tmp_path: Path):
    for merger in ("ties", "wudi"):
        levels = {"base": 0.3, "experts": 0.9, merger: 0.6, "featcal": 0.7}
        make_report(levels, upstream=merger, notes=["read this"]).write(tmp_path / merger)
    lines = Reader(page_text(tmp_path / "ties", tmp_path / "wudi")).texts("li")
    assert [line for line in lines if "read this" in line] == ["all mergers: read this"]
    leave_run(tmp_path / "one", notes=["read this"])
    assert Reader(page_text(tmp_path / "one")).texts("li")[0] == "read this"
