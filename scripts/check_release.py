"""Refuse to build a release without the address of its repository.

    python scripts/check_release.py

A release is a commit with the version's tag, such as v0.2.0. Needs only Python and git.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def refusal(root: Path) -> str:
    """Return why the checkout in a folder must not be built, or nothing."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    address = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    module = (root / "fusion_bench_featcal" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'__version__ = "(.+)"', module)
    command = ["git", "tag", "--points-at", "HEAD"]
    tags = subprocess.run(command, cwd=root, capture_output=True, text=True).stdout.split()
    if f"v{version}" not in tags or address:
        return ""
    return (
        f"pyproject.toml: repository is empty, and this commit is v{version}. Set the "
        "repository's address, commit, and move the tag"
    )


if __name__ == "__main__":
    sys.exit(refusal(ROOT) or None)
