"""`make reproduce`: commands of the paper's tables, and its observations beside results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paper
import pytest
from composing import REPOSITORY

FAKE = """#!/bin/sh
echo "$*" >> "$RECORD"
case "$*" in *flan*) exit 3;; esac
"""


def reproduce(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a `fusion_bench` that only records its words, and fails for FLAN-T5."""
    program = folder / "fusion_bench"
    program.write_text(FAKE)
    program.chmod(0o755)
    places = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record")}
    command = [sys.executable, str(REPOSITORY / "scripts" / "reproduce.py"), *words]
    return subprocess.run(command, env=os.environ | places, text=True, capture_output=True)


def test_commands_run_and_failures_are_listed_at_the_end(tmp_path: Path):
    done = reproduce(tmp_path, "--out", str(tmp_path / "out"))
    ran = (tmp_path / "record").read_text().splitlines()
    folder = f"path.log_dir={tmp_path}/out/clip/clip-vit-mini_TA6"
    assert f"method=compare modelpool=clip-vit-mini_TA6 {folder}" in ran
    assert not any("mergebench" in line for line in ran)
    assert done.returncode == 1
    failed = done.stderr.splitlines()
    assert failed[:2] == ["failed:", "fusion_bench method=compare modelpool=flan-t5-mini_TA6"]
    assert not any("llama" in line for line in failed)


def test_the_papers_models_run_on_request_only(tmp_path: Path):
    reproduce(tmp_path, "--paper", "--out", str(tmp_path / "out"))
    ran = (tmp_path / "record").read_text()
    assert "modelpool=clip-vit-large-patch14_TALL20 " in ran
    assert "modelpool=mergebench_llama-3.1-8b-instruct " in ran


def test_listing_runs_nothing(tmp_path: Path):
    listed = reproduce(tmp_path, "--list").stdout
    assert not (tmp_path / "record").exists()
    page = (REPOSITORY / "docs" / "paper.md").read_text(encoding="utf-8")
    commands = [line.split() for line in listed.splitlines() if line.startswith("fusion_bench")]
    assert len(commands) > 10
    for _, method, pool in commands:
        lines = [line for line in page.splitlines() if f"`{method}`" in line]
        assert any(pool.removeprefix("modelpool=") in line for line in lines)


def row(name: str, gain: float, half: float, against: str = "ta") -> dict[str, Any]:
    """A row of a study: its difference in points from another one."""
    ends = {"estimate": gain / 100, "low": (gain - half) / 100, "high": (gain + half) / 100}
    return {"name": name, "upstream": "ta", "against": against, "difference": ends}


def leave_study(folder: Path, *points: tuple[int, list[dict[str, Any]]]) -> None:
    """Write a `samples` study with the merged model at every point."""
    content = {
        "suite": "toy",
        "points": [
            {"labels": {"samples_per_task": n}, "rows": [row("ta", 0, 0), *rows]}
            for n, rows in points
        ],
    }
    (folder / "samples" / "toy").mkdir(parents=True)
    (folder / "samples" / "toy" / "report.json").write_text(json.dumps(content))


def cells(folder: Path) -> dict[str, str]:
    """Observation -> ours, of the table."""
    lines = (line.strip("| ").split(" | ") for line in paper.observations_part(folder).splitlines())
    return {line[0]: line[2] for line in lines if len(line) > 2}


def test_observations_stand_beside_results(tmp_path: Path):
    few = [row("featcal", 6, 4), row("surgery", -1, 3), row("prob_surgery", 2, 1)]
    leave_study(tmp_path, (8, few), (512, [row("featcal", 8, 3), row("surgery", 20, 4)]))
    found = cells(tmp_path)
    assert found["featcal (n = 8) is above the merged model (n = 8)"] == "+6.0 [+2.0, +10.0] holds"
    assert found["surgery (n = 8) is below the merged model (n = 8)"].endswith("not decided")
    assert found["prob_surgery (n = 8) is below the merged model (n = 8)"].endswith("does not hold")
    # Of two calibrated rows: half of the interval is the root of 4 ** 2 + 3 ** 2.
    assert found["featcal (n = 8) is above surgery (n = 8)"] == "+7.0 [+2.0, +12.0] holds"
    assert (
        found["featcal (n = 512) is above surgery (n = 512)"] == "-12.0 [-17.0, -7.0] does not hold"
    )
    assert found["featcal (n = 512) is above prob_surgery (n = 512)"] == "-"


def test_a_study_without_results_has_no_table(tmp_path: Path):
    assert paper.observations_part(tmp_path) == ""


@pytest.mark.parametrize(
    ("low", "high", "relation", "verdict"),
    [
        (0.1, 2, "above", paper.HOLDS),
        (-0.1, 2, "above", paper.OPEN),
        (-2, -0.1, "above", paper.FAILS),
        (-2, -0.1, "below", paper.HOLDS),
        (-1, 1, "level with", paper.HOLDS),
        (-1.1, 1, "level with", paper.OPEN),
        (1.1, 3, "level with", paper.FAILS),
    ],
)
def test_an_interval_decides(low: float, high: float, relation: str, verdict: str):
    assert paper.verdict(low, high, relation) == verdict


def test_observations_agree_with_the_papers_tables():
    def value(side: paper.Side) -> float:
        name, labels = side
        if name == paper.MERGED:
            return float(paper.average(paper.B32, ""))
        if "samples_per_task" in labels:
            return float(paper.average(f"{paper.B32} n={labels['samples_per_task']}", name))
        return float(paper.average(f"{paper.B32} corrupted={labels['corruption']}", name))

    for study in ("samples", "corruption"):
        for one, _, other, difference in paper.OBSERVATIONS[study][1]:
            assert value(one) - value(other) == pytest.approx(difference, abs=0.06), (one, other)
