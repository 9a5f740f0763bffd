"""`make reproduce` runs the commands of the page on the paper."""

import subprocess
import sys

from configs import REPOSITORY


def test_listed_commands_are_those_of_the_page():
    script = [sys.executable, str(REPOSITORY / "scripts" / "reproduce.py"), "--list"]
    listed = subprocess.check_output(script, text=True)
    page = (REPOSITORY / "docs" / "paper.md").read_text(encoding="utf-8")
    commands = [line.split() for line in listed.splitlines() if line.startswith("fusion_bench")]
    assert len(commands) > 10
    for _, method, pool in commands:
        lines = [line for line in page.splitlines() if f"`{method}`" in line]
        assert any(pool.removeprefix("modelpool=") in line for line in lines)
