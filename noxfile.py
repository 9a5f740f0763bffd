"""The tests with each Python of pyproject.toml, and with FusionBench's oldest and newest release.

nox                          # all of them; a Python that is not on this machine is skipped
nox -s "tests-3.12(newest)"  # one of them
"""

import os
import re
import shlex
from pathlib import Path

import nox
from packaging.requirements import Requirement

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = nox.project.python_versions({"project": PROJECT})
FUSION_BENCH = next(
    r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "fusion-bench"
)
(OLDEST,) = (part.version for part in FUSION_BENCH.specifier if part.operator == ">=")
PIP_ARGS = shlex.split(os.environ.get("PIP_ARGS", ""))
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"


@nox.session(python=PYTHONS)
@nox.parametrize("fusion_bench", [f"=={OLDEST}", str(FUSION_BENCH.specifier)], ["oldest", "newest"])
def tests(session: nox.Session, fusion_bench: str) -> None:
    """Run `make test` in an environment of its own."""
    pins = Path("constraints.txt").read_text(encoding="utf-8")
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text(
        re.sub(r"^fusion-bench==.*$", f"fusion-bench{fusion_bench}", pins, flags=re.MULTILINE)
    )
    session.install("--constraint", str(constraints), *PIP_ARGS, "--editable", ".[test]")
    words = ["--numprocesses", "2", "--dist", "loadfile", "-m", "not slow"]
    session.run("python", "-m", "pytest", *words, "--override-ini", "addopts=--strict-markers")
