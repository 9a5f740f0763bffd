"""Processes that are killed at any moment lose nothing."""

import subprocess
import sys
from pathlib import Path

KILLS = Path(__file__).parents[1] / "benchmarks" / "kills.py"


def test_killed_runs_resume_to_the_same_model():
    done = subprocess.run(
        [sys.executable, str(KILLS), "--kills", "8", "--without-suite"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 lost or different" in done.stdout
