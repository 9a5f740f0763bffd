"""Names and messages of the documentation exist. `make docs` checks its links."""

import re
from importlib import import_module
from importlib.util import find_spec

from configs import REPOSITORY

import fusion_bench_featcal

DOCS = REPOSITORY / "docs"


def test_the_api_has_all_public_names():
    named = re.findall(
        r"^::: (\S+)$", (DOCS / "reference/api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {f"fusion_bench_featcal.{name}" for name in fusion_bench_featcal.__all__} <= set(named)
    for name in named:
        module, _, attribute = name.rpartition(".")
        if module.endswith(".sentence_transformers") and find_spec("sentence_transformers") is None:
            continue  # the extra `encoders` is not installed
        assert hasattr(import_module(module), attribute), name


def test_every_quoted_message_is_in_the_code():
    page = (
        (DOCS / "reference/messages.md").read_text(encoding="utf-8").partition("## No message")[0]
    )
    cells = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    assert len(quoted) > 30
    files = (REPOSITORY / "fusion_bench_featcal").rglob("*.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    code = re.sub(r"""["']\n\s*[fr]*["']""", "", code)  # texts that go on in the next line
    for message in quoted:
        fragments = [text.strip() for text in message.replace("(nearest: ...)", "...").split("...")]
        assert sum(map(len, fragments)) >= 9, message
        assert [text for text in fragments if text not in code] == [], message
