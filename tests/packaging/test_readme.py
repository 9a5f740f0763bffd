"""README.md is short, and its Python runs as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

from composing import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_it_is_short():
    assert len(README.encode()) < 7000
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1
    (table,) = re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)
    head_and_rule = 2
    assert len(table.splitlines()) - head_and_rule <= 5
    assert table.splitlines()[0].count("|") - 1 <= 4
    assert not set(table) & set("()[]")


def test_its_python_runs_as_printed(tmp_path: Path):
    (code,) = PYTHON.findall(README)
    lines = [line for line in code.splitlines() if line and "import" not in line.split("#")[0]]
    assert len(lines) <= 10
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "calibrated").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
