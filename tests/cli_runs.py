"""Runs of the real `fusion_bench` command in a process of its own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import fusion_bench_featcal


class Screen(NamedTuple):
    """Screen of a command on a terminal of 80 columns, and its exit code.

    `lines` are those of the terminal: one of 200 characters counts as three, and so does each
    update of a bar, which a file keeps.
    """

    code: int
    text: str
    lines: list[str]

    @property
    def block(self) -> list[str]:
        """The lines from the error on: the last thing on the screen."""
        starts = [n for n, line in enumerate(self.lines) if line.startswith("error: ")]
        assert len(starts) == 1, self.text[-6000:]
        return self.lines[starts[0] :]


def screen(arguments: Sequence[str], cwd: Path, **environment: str) -> Screen:
    """Run `fusion_bench` as a person would, stdout and stderr together."""
    # An editable install holds a copy of the Hydra plugin, of the day it was made.
    plugin = cwd / "plugin" / "hydra_plugins" / "fusion_bench_featcal"
    source = Path(fusion_bench_featcal.__file__).parent / "_hydra_plugin"
    if source.is_dir() and not plugin.exists():
        shutil.copytree(source, plugin)
    known = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    paths = [str(cwd / "plugin"), str(Path(fusion_bench_featcal.__file__).parents[1])]
    known |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-m", "fusion_bench.scripts.cli", *arguments],
        cwd=cwd,
        env=known | {"PYTHONPATH": os.pathsep.join(paths)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    rows = [line[at : at + 80] for line in done.stdout.splitlines() for at in _starts(line)]
    return Screen(done.returncode, done.stdout, rows)


def _starts(line: str) -> range:
    return range(0, max(len(line), 1), 80)


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
