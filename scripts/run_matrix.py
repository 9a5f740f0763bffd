"""Run the tests with each Python in pyproject.toml and FusionBench's oldest and newest.

    python scripts/run_matrix.py [--environments FOLDER] [PYTEST WORDS]

Each pair has a virtual environment, kept in FOLDER. Every Python is tried with the newest
FusionBench that pyproject.toml allows and the package index has, this Python also with the oldest.
A Python that is not on this machine is named in the table, not installed. PIP_ARGS is handed to
pip.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGE = "fusion-bench"
QUICK = "-n 2 --dist loadfile -m 'not slow' --override-ini addopts=--strict-markers"


def named_pythons() -> list[str]:
    """Return minor versions of Python among the classifiers."""
    lines = "\n".join(PROJECT["classifiers"])
    return re.findall(r"^Programming Language :: Python :: (3\.\d+)$", lines, re.MULTILINE)


def find_python(version: str) -> str | None:
    """Return an interpreter of a minor version: this one, on PATH, pyenv's or uv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += [str(path / "bin" / "python") for path in sorted(pyenv.glob(f"{version}.*"))]
    if uv := shutil.which("uv"):
        output = _output(uv, "python", "find", "--no-python-downloads", version)
        candidates.append(output.strip())
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    fitting = (path for path in candidates if path and _output(path, "-c", code) == f"{version}\n")
    return next(fitting, None)


def releases(available: str) -> list[str]:
    """Return oldest and newest release that pyproject.toml allows (once if they are the same).

    Args:
        available: The output of `pip index versions`.
    """
    requirement = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == PACKAGE)
    line = re.search(r"^Available versions: (.*)$", available, re.MULTILINE)
    versions = sorted(map(Version, line.group(1).split(", "))) if line else []
    allowed = [str(version) for version in versions if version in requirement.specifier]
    if not allowed:
        sys.exit(f"the package index has no release of {requirement}")
    return list(dict.fromkeys((allowed[0], allowed[-1])))


def cells(pythons: list[str], versions: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of Python and FusionBench to test."""
    this = "{}.{}".format(*sys.version_info)
    oldest = [(this, version) for version in versions[:-1]]
    return oldest + [(python, versions[-1]) for python in pythons]


def try_cell(python: str, version: str, folder: Path, words: list[str]) -> str:
    """Install and test one pair, and return the line of the table."""
    interpreter = find_python(python)
    if interpreter is None:
        return "not tried: this Python is not on this machine"
    home = folder / f"py{python}-{PACKAGE}{version}"
    if not (home / "bin" / "python").exists():
        subprocess.run([interpreter, "-m", "venv", home], check=True)
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    constraints = home / "constraints.txt"
    constraints.write_text(re.sub(rf"^{PACKAGE}==.*$", f"{PACKAGE}=={version}", pins, flags=re.M))
    executable = str(home / "bin" / "python")
    pip = [executable, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    pip += [*shlex.split(os.environ.get("PIP_ARGS", "")), "--editable", f"{ROOT}[test]"]
    if subprocess.run(pip).returncode:
        return "cannot be installed"
    failed = subprocess.run([executable, "-m", "pytest", *words], cwd=ROOT).returncode
    return "tests fail" if failed else "tests pass"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, text=True, capture_output=True).stdout
    except OSError:
        return ""


def main() -> None:
    """Test all pairs and print a table. The exit code is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-matrix")
    options, words = parser.parse_known_args()
    available = _output(sys.executable, "-m", "pip", "index", "versions", PACKAGE)
    table = {}
    for python, version in cells(named_pythons(), releases(available)):
        print(f"--- Python {python}, FusionBench {version}", flush=True)
        folder = options.environments.absolute()
        table[python, version] = try_cell(python, version, folder, words or shlex.split(QUICK))
    print("\n| Python | FusionBench | |\n|---|---|---|")
    for (python, version), outcome in table.items():
        print(f"| {python} | {version} | {outcome} |")
    if any(outcome.endswith(("fail", "installed")) for outcome in table.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
