"""Runs of the real `fusion_bench` command in a process of its own."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def fusion_bench(
    arguments: Sequence[str], cwd: Path, *, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `fusion_bench` with Hydra overrides, offline, from `cwd`."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "COLUMNS": "160",
    }
    result = subprocess.run(
        [sys.executable, "-m", "fusion_bench.scripts.cli", *arguments, "print_config=false"],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
    )
    if check:
        assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
    return result
