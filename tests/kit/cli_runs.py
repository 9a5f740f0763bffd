"""Runs of the real `fusion_bench` command in a separate process.

Importing FusionBench, transformers and torch takes seconds. So a process that has imported them
forks for each command. Only with `fresh` is the command started in a new interpreter.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import fusion_bench_featcal

COMMAND = "fusion_bench.scripts.cli"
SOURCE = Path(fusion_bench_featcal.__file__).parent
FORKING = """
import gc, json, os, runpy, sys
import fusion_bench_featcal.algorithm, fusion_bench.programs, fusion_bench.scripts.cli
from fusion_bench.modelpool import CLIPVisionModelPool
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm

gc.freeze()
for line in sys.stdin:
    run = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(run["cwd"])
for number, place in enumerate((os.devnull, run["out"], run["out"])):
    os.dup2(os.open(place, os.O_RDWR | os.O_APPEND), number)
os.environ.clear()
os.environ |= run["environment"]
sys.path[:1] = [run["cwd"], *run["paths"]]
sys.argv = ["fusion_bench", *run["arguments"]]
del sys.modules[run["command"]]
runpy.run_module(run["command"], run_name="__main__", alter_sys=True)
"""


class Screen(NamedTuple):
    """Screen of a command on a terminal of 80 columns, and its exit code."""

    code: int
    text: str
    lines: list[str]  # of the terminal: one of 200 characters counts as three

    @property
    def block(self) -> list[str]:
        """The lines from the error on: the last thing on the screen."""
        starts = [n for n, line in enumerate(self.lines) if line.startswith("error: ")]
        assert len(starts) == 1, self.text[-6000:]
        return self.lines[starts[0] :]


def screen(
    arguments: Sequence[str], cwd: Path, *, fresh: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Screen:  # fmt: skip
    """Run `fusion_bench` in `cwd` as a person would, stdout and stderr together."""
    # An editable install holds a copy of the Hydra plugin, of the day it was made.
    plugin = cwd / "plugin" / "hydra_plugins" / "fusion_bench_featcal"
    if (SOURCE / "_hydra_plugin").is_dir() and not plugin.exists():
        shutil.copytree(SOURCE / "_hydra_plugin", plugin)
    out, paths = cwd / ".screen", [str(cwd / "plugin"), str(SOURCE.parent)]
    out.write_text("")
    variables = _environment() | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "80"}
    variables |= environment or {}
    if fresh:
        words = [sys.executable, "-m", COMMAND, *arguments]
        with out.open("a") as stream:
            code = subprocess.call(words, cwd=cwd, env=variables, stdout=stream, stderr=stream)
    else:
        server: Any = _server()
        run = {"arguments": [*arguments], "cwd": str(cwd), "out": str(out), "command": COMMAND}
        server.stdin.write(json.dumps(run | {"environment": variables, "paths": paths}) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
    lines = out.read_text().splitlines()
    rows = [line[at : at + 80] for line in lines for at in range(0, max(len(line), 1), 80)]
    return Screen(code, out.read_text(), rows)


def fusion_bench(arguments: Sequence[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `fusion_bench` with Hydra overrides, offline, from `cwd`. Its screen is `stdout`."""
    words = [*arguments, "print_config=false"]
    done = screen(words, cwd, environment={"COLUMNS": "160"})
    assert done.code == 0, done.text[-6000:]
    return subprocess.CompletedProcess(words, 0, done.text, "")


def _environment() -> dict[str, str]:
    usual = {n: v for n, v in os.environ.items() if n not in ("HYDRA_FULL_ERROR", "COLUMNS")}
    return usual | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@cache
def _server() -> "subprocess.Popen[str]":
    """The process that forks. It ends when this process closes its input."""
    paths = os.pathsep.join([str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    # without COLUMNS, which consoles that are made on import take for ever
    environment = _environment() | {"PYTHONPATH": paths}
    pipe, words = subprocess.PIPE, [sys.executable, "-c", FORKING]
    return subprocess.Popen(words, env=environment, stdin=pipe, stdout=pipe, text=True)
