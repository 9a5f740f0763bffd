"""The messages that docs/troubleshooting.md quotes are those of the code."""

import ast
import re

from composing import REPOSITORY

ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
LEAST_LETTERS = 10


def messages() -> list[str]:
    """Every string of the package, with `...` for what is filled in."""
    found = []
    for file in sorted((REPOSITORY / "fusion_bench_featcal").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "...", node.value))
    return found


def pattern(quoted: str) -> re.Pattern[str]:
    """Match a message that has the quoted words in their order."""
    return re.compile(".*".join(map(re.escape, quoted.split("..."))), re.DOTALL)


def test_every_quoted_message_is_in_the_code():
    known = messages()
    quoted = ROW.findall((REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8"))
    assert len(quoted) > 30
    for words in quoted:
        assert len(re.sub(r"[^a-z]", "", words)) >= LEAST_LETTERS, words
        assert any(pattern(words).search(message) for message in known), words


def test_a_message_that_is_not_in_the_code_is_noticed():
    assert pattern("expert ... is ... broken").search("the expert ... is badly broken")
    assert not any(pattern("--base is gone: ...").search(message) for message in messages())
