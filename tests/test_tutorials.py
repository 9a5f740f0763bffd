"""The tutorials of docs/tutorials, word for word: every command and snippet, in order.

Other commands run elsewhere: docs/tasks.md in tests/tasks, the commands of README.md and
docs/install.md in .ci/run (scripts/readme_commands.py), README's Python in
packaging/test_release.py, the notebook in `make notebook`. All remaining commands of the pages
are composed or parsed by packaging/test_configs.py.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIALS = sorted(Path(__file__).resolve().parents[1].glob("docs/tutorials/*.md"))
BLOCK = re.compile(r"^```(sh|bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# File that a page's last command leaves, below the folder of the tutorial.
LEFT = {
    "classifiers": "try/classifiers/shared/heads/mini_notmnist/head.safetensors",
    "clip": "try/clip/repaired/model.safetensors",
    "family": "try/outputs",
    "lora": "try/lora/repaired/model.safetensors",
    "mergekit": "try/mergekit/repaired/model.safetensors",
    "method": "try/outputs/comparison",
    "rule": "try/mini_balinese",
}


def script_of(page: Path) -> str:
    """All blocks of a page as one script. The package is installed already."""
    scripts = []
    for language, block in BLOCK.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            block = f"python -c '{block}'\n"
        scripts.append(re.sub(r"^pip install .*$", "", block, flags=re.MULTILINE))
    return "".join(scripts)


def test_every_tutorial_is_run():
    assert [page.stem for page in TUTORIALS] == sorted(LEFT)
    assert all("'" not in block for page in TUTORIALS for kind, block in
               BLOCK.findall(page.read_text(encoding="utf-8")) if kind == "python")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_printed(page: Path, tmp_path: Path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}
    (tmp_path / "examples").symlink_to(TUTORIALS[0].parents[2] / "examples")
    command = ["bash", "-euo", "pipefail", "-c", script_of(page)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / LEFT[page.stem]).exists()
