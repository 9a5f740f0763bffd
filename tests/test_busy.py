"""Threads that wait without spinning."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("own", "wanted"), [(None, "passive"), ("active", "active")])
def test_featcal_and_make_set_it_unless_the_user_did(own, wanted):
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    environment |= {} if own is None else {"OMP_WAIT_POLICY": own}
    code = (
        "import os, sys; from fusion_bench_featcal.cli import main; main(['suite', 'path']); "
        "assert 'torch' not in sys.modules; print(os.environ['OMP_WAIT_POLICY'])"
    )
    commands = [[sys.executable, "-c", code]]
    if shutil.which("make"):
        rule = "show: ; @echo $$OMP_WAIT_POLICY"
        commands.append(
            ["make", "--silent", "-f", str(ROOT / "Makefile"), f"--eval={rule}", "show"]
        )
    for command in commands:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == wanted
