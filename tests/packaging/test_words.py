"""Every rule of scripts/words.toml finds its words, and the sources have none."""

import runpy
import tomllib
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
SOURCE = '''\
"""Where texts begin."""  # anew

place = 1


def add(found):
    """Own what; those are."""
'''
PAGE = "One; two; three `a;` &amp;\n\n```\n;;\n```\n\nMeanwhile $a;b$.\n"
FINDINGS = [
    "package/a.py:1: old adverb 'anew'",
    "package/a.py:6: vague name 'found'",
    "package/a.py:1: docstring begins with 'where'",
    "docstrings: 'those' 125.00 times per 1,000 words, at most 0.3",
    "docstrings: ';' 125.00 times per 1,000 words, at most 0.5",
    "page.md: 2 semicolons, at most 1",
    "page.md: old adverb 'Meanwhile'",
]


def test_a_rule_reports_its_words(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "a.py").write_text(SOURCE)
    (tmp_path / "page.md").write_text(PAGE)
    rules = tomllib.loads((SCRIPTS / "words.toml").read_text())
    rules["sources"] = {"folders": ["package"], "pages": ["*.md"]}
    script = runpy.run_path(str(SCRIPTS / "check_words.py"))
    assert set(FINDINGS) <= set(script["findings"](tmp_path, rules))
