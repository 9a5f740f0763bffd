"""`make reproduce`: commands of the paper's tables, and its observations beside results."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import paper
import pytest
from configs import REPOSITORY

FAKE = """#!/bin/sh
echo "$*" >> "$RECORD"
case "$*" in *flan*) exit 3;; esac
"""


def reproduce(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the script with a `fusion_bench` that only records its words, and fails for FLAN-T5."""
    program = folder / "fusion_bench"
    program.write_text(FAKE)
    program.chmod(0o755)
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(folder / "record")}
    command = [sys.executable, str(REPOSITORY / "scripts" / "reproduce.py"), *words]
    return subprocess.run(command, env=os.environ | paths, text=True, capture_output=True)


def test_commands_run_and_failures_are_listed_at_the_end(tmp_path: Path):
    done = reproduce(tmp_path, "--out", str(tmp_path / "out"))
    commands = (tmp_path / "record").read_text().splitlines()
    folder = f"path.log_dir={tmp_path}/out/clip/clip-vit-mini_TA6"
    assert f"method=compare modelpool=clip-vit-mini_TA6 {folder}" in commands
    assert not any("mergebench" in line for line in commands)  # the paper's, on request only
    assert done.returncode == 1
    failed = done.stderr.splitlines()
    assert failed[:2] == ["failed:", "fusion_bench method=compare modelpool=flan-t5-mini_TA6"]
    assert not any("llama" in line for line in failed)


def test_listed_commands_are_those_of_the_page(tmp_path: Path):
    listed = reproduce(tmp_path, "--list").stdout
    assert not (tmp_path / "record").exists()
    page = (REPOSITORY / "docs" / "paper.md").read_text(encoding="utf-8")
    commands = [line.split() for line in listed.splitlines() if line.startswith("fusion_bench")]
    assert len(commands) > 10
    for _, method, pool in commands:
        lines = [line for line in page.splitlines() if f"`{method}`" in line]
        assert any(pool.removeprefix("modelpool=") in line for line in lines)


def row(name: str, gain: float, half: float) -> dict[str, Any]:
    """A row of a study: its difference in points from the merged model."""
    ends = {"estimate": gain / 100, "low": (gain - half) / 100, "high": (gain + half) / 100}
    return {"name": name, "upstream": "ta", "against": "ta", "difference": ends}


def test_observations_stand_beside_results(tmp_path: Path):
    assert paper.observations_part(tmp_path) == ""
    few = [row("featcal", 6, 4), row("surgery", -1, 3), row("prob_surgery", 2, 1)]
    many = [row("featcal", 8, 3), row("surgery", 20, 4)]
    points = [
        {"labels": {"samples_per_task": n}, "rows": [row("ta", 0, 0), *rows]}
        for n, rows in ((8, few), (512, many))
    ]
    report = tmp_path / "samples" / "toy" / "report.json"
    report.parent.mkdir(parents=True)
    report.write_text(json.dumps({"suite": "toy", "points": points}))
    lines = paper.observations_part(tmp_path).splitlines()
    cells = {line[0]: line[2] for text in lines if len(line := text.strip("| ").split(" | ")) > 2}
    assert cells["featcal (n = 8) is above the merged model (n = 8)"] == "+6.0 [+2.0, +10.0] holds"
    assert cells["surgery (n = 8) is below the merged model (n = 8)"].endswith("not decided")
    assert cells["prob_surgery (n = 8) is below the merged model (n = 8)"].endswith("does not hold")
    # Of two calibrated rows: half of the interval is the root of 4 ** 2 + 3 ** 2.
    assert cells["featcal (n = 8) is above surgery (n = 8)"] == "+7.0 [+2.0, +12.0] holds"
    assert cells["featcal (n = 512) is above prob_surgery (n = 512)"] == "-"


def test_an_interval_decides():
    for low, high, verdict in ((-1, 1, paper.HOLDS), (-1.1, 1, paper.OPEN), (1.1, 3, paper.FAILS)):
        assert paper.verdict(low, high, "level with") == verdict


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
