"""README.md and docs/: generated parts are fresh, and what the pages print runs or is valid.

The commands of README.md that are marked for CI run in scripts/readme_commands.py.
"""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import write_tables
from configs import REPOSITORY, composing, yaml_of_page
from hub_mirror import Mirror
from hydra import compose

from fusion_bench_featcal.cli import _parser

DOCS = REPOSITORY / "docs"
if not DOCS.is_dir():
    pytest.skip("an installation has no docs", allow_module_level=True)
PAGES = {
    page.relative_to(DOCS if page.is_relative_to(DOCS) else REPOSITORY).as_posix(): page
    for page in write_tables.PAGES
}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
SHELLS = ("bash", "sh")
LANGUAGES = (*SHELLS, "python")
COMMAND = re.compile(r"(?:^|[ /])(fusion_bench(?:\.scripts\.cli)?|featcal) +(.+?)(?: &)?$")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the code blocks of a text in some languages."""
    return [block for language, block in BLOCK.findall(text) if language in languages]


@pytest.mark.parametrize("name", [n for n, text in TEXTS.items() if "<!-- generated:" in text])
def test_generated_parts_are_fresh(name: str) -> None:
    assert write_tables.rewritten(PAGES[name]) == TEXTS[name], "python scripts/write_tables.py"


# --- sections that run as printed ---

TUTORIALS = [
    ("tutorials/language-model.md", None),
    ("tutorials/embedding-model.md", None),
    ("README.md", "Quickstart"),
    ("howto/mergekit.md", "Merge with mergekit"),
    ("howto/lora.md", "Example"),
    ("howto/no-samples.md", "Example"),
    ("howto/images.md", "CLIP models"),
    ("howto/images.md", "Classifiers"),
    ("howto/check.md", None),
    ("howto/encoders.md", "A reranker"),
    ("howto/own-pool.md", "A complete CLIP pool"),
    ("howto/own-family.md", None),
    ("howto/python.md", "A Hugging Face model"),
    ("howto/python.md", "A model of your own"),
    ("howto/own-method.md", "A rule"),
    ("howto/own-method.md", "A source of weights"),
    ("howto/own-method.md", "A method"),
    ("howto/own-method.md", "A merger"),
]
"""Pages, or one of their sections, that run as printed."""


INSTALLATION = re.compile(r"^(?:python3 -m venv|\. \.venv/|pip install) ?\S.*\n", re.MULTILINE)
"""Commands of a page that make its environment."""


def section(page: str, title: str | None) -> str:
    """Return the text of a section and its subsections, or of the whole page."""
    if title is None:
        return TEXTS[page]
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXTS[page], re.M | re.S)
    return text


def programs(text: str) -> list[str]:
    """Return the code blocks of a text as bash. Blocks of Python in a row are one program.

    Blocks of other languages are not run: `shell` is for commands that need more than packages.
    """
    blocks_to_run = [(lang, b) for lang, b in BLOCK.findall(text) if lang in LANGUAGES]
    scripts = list[str]()
    for language, group in groupby(blocks_to_run, key=itemgetter(0)):
        texts = [block for _, block in group]
        scripts += [f"python - <<'END'\n{''.join(texts)}END\n"] if language == "python" else texts
    return scripts


def run(scripts: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run bash that stops at the first failure, in a folder like a checkout. Returns its output."""
    (folder / "examples").symlink_to(REPOSITORY / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    needs_mergekit = any(block.startswith("mergekit-yaml") for block in scripts)
    if needs_mergekit and shutil.which("mergekit-yaml", path=path) is None:
        pytest.skip("not installed: extra `mergekit`")
    command = ["bash", "-euo", "pipefail", "-c", "".join(scripts)]
    variables = {**environment, "PATH": path}
    done = subprocess.run(command, cwd=folder, env=variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("page", "title"), TUTORIALS)
def test_a_section_runs_as_printed(page: str, title: str | None, tmp_path: Path) -> None:
    """All commands and Python of a section, as one script in a checkout's root."""
    text = section(page, title)
    if "sentence_transformers" in text:
        pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
    scripts = [INSTALLATION.sub("", script) for script in programs(text)]
    output = run(scripts, tmp_path, os.environ | {"HF_HUB_OFFLINE": "1"})
    printed = [line.rstrip() for line in output.splitlines()]
    tables = "".join(blocks(text, "text"))
    assert {*re.findall(r"^average  .*", tables, re.MULTILINE)} <= {*printed}


@pytest.mark.slow
def test_the_page_after_the_repair_runs_as_printed(tmp_path: Path) -> None:
    """Its commands keep the gain of the repair, and upload to a mirror of the hub."""
    pytest.importorskip("llmcompressor", reason="not installed: nox -s after")
    with Mirror() as mirror:
        environment = mirror.environment(tmp_path / "home") | {"HF_TOKEN": "hf_test"}
        output = run(programs(TEXTS["howto/after.md"]), tmp_path, environment)
    merged, *others = map(float, re.findall(r"\|exact_match\|.*?\|([\d. ]+)\|", output))
    assert len(others) == 3 and min(others) > merged + 0.1, output  # repaired, 4 bits, adapter
    folder = tmp_path / "try-after"
    config = json.loads((folder / "repaired-w4a16" / "config.json").read_text(encoding="utf-8"))
    (scheme,) = config["quantization_config"]["config_groups"].values()
    assert (scheme["weights"]["num_bits"], scheme["weights"]["group_size"]) == (4, 128)
    uploaded = mirror.repositories["my-name/repaired"].files
    written = {path.name for path in (folder / "repaired").iterdir()} - {"featcal"}
    assert uploaded.keys() == written and b"license: apache-2.0" in uploaded["README.md"]


# --- commands ---

POOLS = {
    "my_pool": ("howto/own-pool.md", "own-task"),
    "my_texts": ("howto/own-pool.md", "own-text-task"),
    "my_models": ("howto/own-pool.md", "folders"),
    "my_clip": ("howto/own-pool.md", "clip-pool"),
}
"""Model pool that docs describe -> page and mark of its YAML."""
CHOICE = re.compile(r"\+?(method|modelpool|taskpool)(@[\w.]+)?=")
"""Override that selects a config. All others set values."""
SWEEP = re.compile(r"^([^\[{,]*(?:\{[^}]*\})?),.*")
"""Override with several values, of which the first is taken."""


def commands_of(text: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands of code blocks, and those of the prose that have no ellipsis."""
    lines = "\n".join(blocks(text, "", *SHELLS)).replace("\\\n", " ").splitlines()
    spans = [span.replace("\n", " ") for span in INLINE.findall(BLOCK.sub("", text))]
    for line in (*lines, *(s for s in spans if "..." not in s and COMMAND.match(s))):
        if match := COMMAND.search(re.sub(r"\$\{?\w+\}?", "1", line)):
            yield match[1], *shlex.split(match[2], comments=True)


@pytest.mark.slow
@pytest.mark.ci
def test_every_command_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(REPOSITORY / "examples" / "own_family" / "config", tmp_path / "config")
    pools = tmp_path / "config" / "modelpool"
    pools.mkdir()
    for name, (page, mark) in POOLS.items():
        (pools / f"{name}.yaml").write_text(yaml_of_page(page, mark))
    monkeypatch.chdir(tmp_path)
    commands = dict.fromkeys(w for text in TEXTS.values() for w in commands_of(text))
    assert sum(program == "fusion_bench" for program, *_ in commands) >= 30
    programs: dict[tuple[str, ...], dict[str, str]] = {}
    for program, *words in commands:
        if program == "featcal":
            if words == ["--help"]:
                continue
            if len(words) == 1 and words[0] not in ("ls", "suite"):  # only mentioned
                words += ["featcal", *(["--out", "DIR"] if words[0] == "calibrate" else [])]
            words = getattr(_parser().parse_args(words), "words", [])
            words = words if any("=" in word for word in words) else []
        words = [SWEEP.sub(r"\1", word) for word in words if not word.startswith(("-", "hydra"))]
        choices = tuple(sorted(filter(CHOICE.match, words)))
        values = {word.partition("=")[0]: word for word in words if word not in choices}
        programs[choices] = programs.get(choices, {}) | values
    with composing():
        for choices, values in programs.items():  # once for all commands with equal configs
            compose("fabric_model_fusion", [*choices, *values.values()])


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if blocks(text, "python")])
def test_python_compiles_and_imports_public_names(page: str) -> None:
    for block in blocks(TEXTS[page], "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and "fusion_bench_featcal" in str(node.module):
                if str(node.module).endswith(".sentence_transformers"):
                    pytest.importorskip("sentence_transformers", minversion="6.2")
                module: Any = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names)


def test_every_row_of_a_comparison_has_a_line() -> None:
    config = (REPOSITORY / "config" / "method" / "compare.yaml").read_text(encoding="utf-8")
    rows = re.findall(r"@upstream_mergers\.(\w+):", config)
    methods = config.partition("\npost_merging_methods:")[2].partition("\ndefault_rows:")[0]
    rows += re.findall(r"^  (\w+):", methods, re.MULTILINE)
    heads = re.findall(r"^\| (`[^|]*`) \|", TEXTS["reference/methods.md"], re.MULTILINE)
    assert len(rows) > 25 and {*rows} <= {name for head in heads for name in INLINE.findall(head)}
