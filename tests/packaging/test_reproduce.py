"""`make reproduce`: commands of the paper's tables, and its observations beside results."""

import os
import subprocess
import sys
from pathlib import Path

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
