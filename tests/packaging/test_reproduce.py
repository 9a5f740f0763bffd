"""`make reproduce`: every command of the paper's tables is run or named, and failures are told."""

import os
import subprocess
import sys
from pathlib import Path

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
    commands = [line for line in listed.splitlines() if line.startswith("fusion_bench")]
    assert len(commands) > 10
    assert all(line in page.splitlines() for line in commands)
