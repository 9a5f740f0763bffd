"""The generated parts of README and docs are what their script would write now."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_parts_are_fresh() -> None:
    command = [sys.executable, "scripts/write_tables.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
