"""Tests in other environments. Each session has its own; `make nightly` runs all of them.

nox -s openclip              # one session
nox -s "tests-3.12(newest)"  # with a Python that is not on this machine, a session is skipped
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
PINS = Path("constraints")
nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_venv = "yes"


def install(session: nox.Session, extras: str, **versions: str) -> None:
    """Install the package with extras, and with other versions than the pinned ones if given."""
    pins = "".join((PINS / f"{name}.txt").read_text("utf-8") for name in ("shared", "default"))
    pins = pins.replace("-c shared.txt\n", "")
    for name, version in versions.items():
        package = name.replace("_", "-")
        pins = re.sub(rf"^{package}==", f"{package}{version} # ", pins, flags=re.MULTILINE)
    constraints = Path(session.create_tmp(), "constraints.txt")
    constraints.write_text(pins, encoding="utf-8")
    session.install("--constraint", str(constraints), *PIP_ARGS, "--editable", f".[{extras}]")


@nox.session(python=PYTHONS)
@nox.parametrize("fusion_bench", [f"=={OLDEST}", str(FUSION_BENCH.specifier)], ["oldest", "newest"])
def tests(session: nox.Session, fusion_bench: str) -> None:
    """Run `make test` with each Python, and with FusionBench's oldest and newest release."""
    install(session, "test", fusion_bench=fusion_bench)
    test(session)


@nox.session
def torch(session: nox.Session) -> None:
    """Run `make test` with the newest torch. PIP_ARGS may name an index of CPU wheels."""
    install(session, "test", torch=">=2.13")
    session.run("python", "-c", "import torch; print(torch.__version__)")
    test(session)


def test(session: nox.Session) -> None:
    """Run the tests of `make test`."""
    words = ["--numprocesses", "2", "--dist", "loadfile", "-m", "not slow"]
    session.run("python", "-m", "pytest", *words, "--override-ini", "addopts=--strict-markers")


@nox.session
def openclip(session: nox.Session) -> None:
    """Run the tests of open_clip's models."""
    install(session, "test")
    pins = str(PINS / "open-clip.txt")
    session.install("--no-deps", *PIP_ARGS, "--requirement", pins)
    # Where torchvision fits torch, PYTHONPATH is not needed: see sitecustomize.py there.
    environment = {"PYTHONPATH": str(Path("tests/openclip").resolve())}
    session.run("python", "-m", "pytest", "tests/openclip", env=environment)


@nox.session
def llm(session: nox.Session) -> None:
    """Run the tests of lm-eval."""
    install(session, "test,llm")
    session.run("python", "-m", "pytest", "tests/llm")


@nox.session
def after(session: nox.Session) -> None:
    """Run the commands of docs/howto/after.md, with a transformers version of their own."""
    pins, extras = str(PINS / "after.txt"), ".[test,llm,mergekit]"
    session.install("--constraint", pins, *PIP_ARGS, "--editable", extras, "llmcompressor", "trl")
    session.run("python", "-m", "pytest", "tests/test_pages.py", "-k", "after_the_repair")


@nox.session
def notebook(session: nox.Session) -> None:
    """Run the notebook. `nox -s notebook -- --inplace` keeps its outputs."""
    install(session, "notebook")
    words = ["--kernel_name=python3", "examples/walkthrough.ipynb"]
    session.run("jupyter", "execute", *session.posargs, *words)
