"""The messages that docs/troubleshooting.md quotes are those of the code."""

import ast
import re
from typing import Any

from composing import REPOSITORY

CELL = re.compile(r"^\| (`.*?`) \|", re.MULTILINE)
MESSAGE = re.compile(r"`([^`]+)`")
END = "## No message"
HINTS = dict.fromkeys(("nearest_hint", "hint"), " (nearest: ...)")
LEAST_LETTERS = 9


def messages() -> list[str]:
    """Every string of the package, with `...` for what is filled in."""
    found = []
    for file in sorted((REPOSITORY / "fusion_bench_featcal").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(map(filled, node.values)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "...", node.value))
    return found


def filled(part: ast.expr) -> str:
    """Words of a part of a message: those of the hint at the nearest name too."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    call = getattr(part, "value", None)
    name: Any = getattr(getattr(call, "func", call), "id", "")
    return HINTS.get(name, "...")


def quoted_messages() -> list[str]:
    """Every message in the first cells of the page's tables."""
    page = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    cells = CELL.findall(page.partition(END)[0])
    return [message for cell in cells for message in MESSAGE.findall(cell)]


def pattern(quoted: str) -> re.Pattern[str]:
    """Match a message that has the quoted words in their order."""
    return re.compile(".*".join(map(re.escape, quoted.split("..."))), re.DOTALL)


def test_every_quoted_message_is_in_the_code():
    known, quoted = messages(), quoted_messages()
    assert len(quoted) > 40
    for words in quoted:
        assert len(re.sub(r"[^a-z]", "", words)) >= LEAST_LETTERS, words
        assert any(pattern(words).search(message) for message in known), words


def test_a_message_that_is_not_in_the_code_is_noticed():
    assert pattern("expert ... is ... broken").search("the expert ... is badly broken")
    assert not any(pattern("--base is gone: ...").search(message) for message in messages())
