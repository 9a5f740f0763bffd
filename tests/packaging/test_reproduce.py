"""`make reproduce`: commands of the paper's tables, and its observations beside results."""

import subprocess
import sys

import paper
import pytest
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


def test_observations_agree_with_the_papers_tables():
    def value(side: paper.Side) -> float:
        name, labels = side
        if name == paper.MERGED:
            return float(paper.average(paper.B32, ""))
        if "samples_per_task" in labels:
            return float(paper.average(f"{paper.B32} n={labels['samples_per_task']}", name))
        return float(paper.average(f"{paper.B32} corrupted={labels['corruption']}", name))

    for study in ("samples", "corruption"):
        for one, _, other, difference in paper.OBSERVATIONS[study][1]:
            assert value(one) - value(other) == pytest.approx(difference, abs=0.06), (one, other)
