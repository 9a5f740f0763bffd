"""Every command in README.md and docs/ composes, or parses: printed commands can be typed."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from configs import REPOSITORY, composed

import fusion_bench_featcal.compat  # noqa: F401
from fusion_bench_featcal.cli import _parser

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
SHELLS = ("", "bash", "sh", "console")
PROGRAMS = ("fusion_bench", "fusion_bench.scripts.cli", "featcal")
POOLS = {"my_pool": ("tasks.md", "own-task"), "my_models": ("calibrate.md", "folders")}
"""Model pool that docs describe -> page and mark of its YAML."""


def words_of(line: str) -> list[str]:
    """Words of a shell line from the program on, or none if it runs neither program."""
    line = re.sub(r"\$\{?\w+\}?", "1", line).removeprefix("$ ").removesuffix(" &")
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # prose with an apostrophe
        return []
    for position, word in enumerate(words):
        program = word.rpartition("/")[2]
        if program in PROGRAMS and (position == 0 or words[position - 1] != "import"):
            return [program, *words[position + 1 :]]
    return []


def commands_of(text: str) -> Iterator[tuple[str, ...]]:
    """Whole commands of code blocks, and commands in the text that have no ellipsis."""
    for language, block in BLOCK.findall(text):
        if language in SHELLS:
            for line in block.replace("\\\n", " ").splitlines():
                yield tuple(words_of(line))
    for span in INLINE.findall(BLOCK.sub("", text)):
        if "..." not in span and span.startswith(PROGRAMS):
            yield tuple(words_of(span.replace("\n", " ")))


TEXTS = [page.read_text(encoding="utf-8") for page in PAGES]
COMMANDS = dict.fromkeys(words for text in TEXTS for words in commands_of(text) if len(words) > 1)
"""Each command once, in order; programs that are only mentioned are left out."""


@pytest.fixture
def folder_with_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the model pools that the docs describe, to start in."""
    # The tutorial on families starts in a copy of this example.
    shutil.copytree(REPOSITORY / "examples" / "own_family" / "config", tmp_path / "config")
    pools = tmp_path / "config" / "modelpool"
    pools.mkdir(parents=True)
    for name, (page, mark) in POOLS.items():
        text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
        block = re.search(rf"<!-- {mark} -->\n```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        assert block
        (pools / f"{name}.yaml").write_text(block[1])
    monkeypatch.chdir(tmp_path)


def overrides_of(words: list[str]) -> list[str]:
    """Words of `fusion_bench` without Hydra's options and their values."""
    if "--config-dir" in words:
        position = words.index("--config-dir")
        words = words[:position] + words[position + 2 :]
    return [word for word in words if not word.startswith("--")]


@pytest.mark.usefixtures("folder_with_pools")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_command_is_valid(words: tuple[str, ...]) -> None:
    program, *rest = words
    if program != "featcal":
        composed(*overrides_of(rest))
        return
    if len(rest) == 1 and rest[0] not in ("--help", "suite"):  # only mentioned
        rest += ["featcal", *(["--out", "DIR"] if rest[0] == "calibrate" else [])]
    options = _parser().parse_args(rest)
    if any("=" in word for word in getattr(options, "words", ())):
        composed(*options.words)


def test_commands_are_found_and_wrong_ones_noticed() -> None:
    lines = [" ".join(words) for words in COMMANDS]
    assert "fusion_bench method=featcal modelpool=clip-vit-mini_TA6" in lines
    assert sum(line.startswith("fusion_bench") for line in lines) >= 30
    text = "```\nfusion_bench method=compare \\\n  method.nothing=1\n```\nSee `featcal repot RUN`."
    (compared, reported) = commands_of(text)
    with pytest.raises(Exception, match="nothing"):
        composed(*compared[1:])
    with pytest.raises(SystemExit):
        _parser().parse_args(reported[1:])
