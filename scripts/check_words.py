"""Check names, docstrings and pages against the word list scripts/words.toml.

    python scripts/check_words.py

Prints a line for each finding and exits with 1 if there is any.
"""

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORD_LIST = Path(__file__).with_name("words.toml")
# Code and formulas on a page, and HTML entities, which end in a semicolon.
_CODE = re.compile(
    r"^```.*?^```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|&#?\w+;", re.DOTALL | re.MULTILINE
)
_TEXT_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}


def findings(root: Path, rules: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each finding in the sources and pages below a folder."""
    files = {
        path.relative_to(root).as_posix(): path.read_text(encoding="utf-8")
        for folder in rules["sources"]["folders"]
        for path in sorted((root / folder).rglob("*.py"))
    }
    trees = {name: ast.parse(text) for name, text in files.items()}
    yield from vague_names(trees, rules["names"])
    yield from frequent_words(trees, rules["docstrings"])
    words = rules["adverbs"]["words"]
    adverbs = re.compile(rf"\b({'|'.join([*words, *map(str.capitalize, words)])})\b")
    for name, text in files.items():
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type in _TEXT_TOKENS and (match := adverbs.search(token.string)):
                yield f"{name}:{token.start[0]}: old adverb '{match[0]}'"
    for pattern in rules["sources"]["pages"]:
        for path in sorted(root.glob(pattern)):
            text = _CODE.sub("", path.read_text(encoding="utf-8"))
            yield from page_findings(path.relative_to(root).as_posix(), text, adverbs, rules)


def page_findings(
    name: str, text: str, adverbs: re.Pattern[str], rules: dict[str, Any]
) -> Iterator[str]:
    """Yield findings on a page, given its text without code."""
    if (number := text.count(";")) > (limit := rules["pages"]["semicolons"]):
        yield f"{name}: {number} semicolons, at most {limit}"
    yield from (f"{name}: old adverb '{match[0]}'" for match in adverbs.finditer(text))


def vague_names(trees: dict[str, ast.Module], rules: dict[str, Any]) -> Iterator[str]:
    """Yield stored names and arguments that are on the list, if there are too many."""
    vague, lines = set(rules["vague"]), []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            word = node.arg if isinstance(node, ast.arg) else ""
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                word = node.id
            if word.lstrip("_") in vague and isinstance(node, ast.arg | ast.Name):
                lines.append((f"{name}:{node.lineno}: vague name '{word}'", word))
    refused = [line for line, word in lines if word not in rules["allowed"]]
    yield from refused or [line for line, _ in lines] * (len(lines) > rules["limit"])


def frequent_words(trees: dict[str, ast.Module], rules: dict[str, Any]) -> Iterator[str]:
    """Yield docstrings with a refused first word, and words that are too frequent."""
    counts: Counter[str] = Counter()
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            words = re.findall(r"[a-z]+|;", (ast.get_docstring(node) or "").lower())
            counts.update(words)
            if words and words[0] in rules["openings"]:
                yield f"{name}:{node.body[0].lineno}: docstring begins with '{words[0]}'"
    for word, limit in rules["per_1000"].items():
        rate = 1000 * counts[word] / max(1, counts.total())
        if rate > limit:
            yield f"docstrings: '{word}' {rate:.2f} times per 1,000 words, at most {limit}"


if __name__ == "__main__":
    lines = list(findings(ROOT, tomllib.loads(WORD_LIST.read_text(encoding="utf-8"))))
    print("\n".join(lines) or "words: nothing to change")
    sys.exit(bool(lines))
