"""`featcal report` and a study tell the same of the same runs."""

import re
from pathlib import Path

import pytest
from synthetic import make_report

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.results.study import Group
from fusion_bench_featcal.results.study_files import make_study
from fusion_bench_featcal.results.study_page import study_markdown

LEVELS = (0.65, 0.75, 0.7)


def runs_of(folder: Path, levels: tuple[float, ...], items: bool = True) -> list[Path]:
    """A run for each level of featcal, of seeds 0, 1, ..."""
    runs = []
    for seed, level in enumerate(levels):
        levels_of = {"base": 0.3, "experts": 0.95, "ties": 0.5, "featcal": level}
        report = make_report(levels_of, upstream="ties", seed=seed, items=items)
        report.seeds["comparison"] = seed
        runs.append(report.write(folder / str(seed)).parent)
    return runs


@pytest.mark.parametrize("items", [True, False])
@pytest.mark.parametrize("levels", [LEVELS[:2], LEVELS, LEVELS[:1]])
def test_report_and_study_agree(tmp_path: Path, capsys, levels: tuple[float, ...], items: bool):
    runs = runs_of(tmp_path / "runs", levels, items)
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    report = (tmp_path / "out" / "report.md").read_text()
    seeds = list(range(len(levels)))
    study = make_study("own", "toy", [Group({"n": 1}, runs)], seeds=seeds, over=[],
                       against=None, design="product")  # fmt: skip
    page = study_markdown(study)
    (average,) = re.findall(r"\n\| \+ featcal \| (\d\d\.\d(?: ± \d+\.\d)?) \| \+", page)
    assert f"| {average} |" in report
    for text in (page, report):
        assert ("50.0 ± 0.0" in text) == (len(levels) > 1)
    assert ("±" in average) == (len(levels) > 1)
    (gain,) = re.findall(r"\n\| \+ featcal \|.*?\| (\+\d\d\.\d \[.*?\]) \| merged", page)
    if items or len(levels) > 1:
        assert f"| {gain} |" in report
    if items:
        assert main(["report", *map(str, runs), "--against", "ties"]) == 0
        (limits,) = re.findall(r"ties/featcal .* (\S+) to +(\S+) ", capsys.readouterr().out)
        expected = [float(limit) for limit in re.findall(r"[+-]\d+\.\d", gain)[1:]]
        # It has resamples of its own.
        assert [*map(float, limits)] == pytest.approx(expected, abs=1)


@pytest.mark.parametrize("levels", [LEVELS[:2], LEVELS])
def test_plus_minus_is_half_of_students_interval(tmp_path: Path, capsys, levels):
    deviation = 0.05 if len(levels) == 3 else 0.1 / 2**0.5
    half = {2: 12.706, 3: 4.3027}[len(levels)] * deviation / len(levels) ** 0.5
    runs = runs_of(tmp_path / "runs", levels)
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "out")]) == 0
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"70.0 ± {100 * half:.1f} |" in report
    text = " ".join(capsys.readouterr().out.split())
    assert f"mean over {len(levels)} runs, ± half of the 95 % interval of this mean" in text
