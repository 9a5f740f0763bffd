"""One of something is written in the singular."""

import re
from pathlib import Path

import pytest

from fusion_bench_featcal.plurals import counted

PACKAGE = Path(__file__).resolve().parents[1] / "fusion_bench_featcal"
BARE = re.compile(r"""(?:\}|%d) (?:tasks|samples|threads|images|cores|cells|tensors)\b""")


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "task", "1 task"),
        (2, "task", "2 tasks"),
        (0, "task", "0 tasks"),
        ("1", "sample", "1 sample"),
        ("1 to 2", "sample", "1 to 2 samples"),
        (1, "row of --data", "1 row of --data"),
        (3, "row of --data", "3 rows of --data"),
    ],
)
def test_counted(number, noun, text):
    assert counted(number, noun) == text


def test_no_text_has_a_bare_plural_behind_a_number():
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if BARE.search(path.read_text(encoding="utf-8"))
    ]
    assert found == [], "plurals.counted writes a number with its noun"
