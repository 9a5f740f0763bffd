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
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in write_tables.PAGES}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`([^`]+)`")
SHELLS = ("bash", "sh")
LANGUAGES = (*SHELLS, "python")
COMMAND = re.compile(r"(?:^|[ /])(fusion_bench(?:\.scripts\.cli)?|featcal) +(.+?)(?: &)?$")


def blocks(text: str, *languages: str) -> list[str]:
    """Return the code blocks of a text in some languages."""
    return [block for language, block in BLOCK.findall(text) if language in languages]


@pytest.mark.parametrize("page", write_tables.PAGES, ids=lambda page: page.name)
def test_generated_parts_are_fresh(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert write_tables.rewritten(page) == text, "python scripts/write_tables.py"


# --- sections that run as printed ---

TUTORIALS = [
    ("calibrate.md", "mergekit"),
    ("calibrate.md", "LoRA adapters"),
    ("calibrate.md", "CLIP"),
    ("calibrate.md", "Classifiers"),
    ("encoders.md", "An embedding model"),
    ("encoders.md", "A reranker"),
    ("python.md", "A model of Hugging Face"),
    ("python.md", "A model of your own"),
    ("models.md", "A model family"),
    ("own_method.md", "A rule"),
    ("own_method.md", "A source of weights"),
    ("own_method.md", "A method"),
    ("own_method.md", "A merger"),
]


def section(page: str, title: str) -> str:
    """Return the text of a section and its subsections."""
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
    if shutil.which("mergekit-yaml", path=path) is None:
        scripts = [block for block in scripts if not block.startswith("mergekit-yaml")]
    command = ["bash", "-euo", "pipefail", "-c", "".join(scripts)]
    variables = {**environment, "PATH": path}
    done = subprocess.run(command, cwd=folder, env=variables, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("page", "title"), TUTORIALS)
def test_a_section_runs_as_printed(page: str, title: str, tmp_path: Path) -> None:
    """All commands and Python of a section, as one script in a checkout's root."""
    if page == "encoders.md":
        pytest.importorskip("sentence_transformers", minversion="6.2", reason="extra `encoders`")
    output = run(programs(section(page, title)), tmp_path, os.environ | {"HF_HUB_OFFLINE": "1"})
    if title == "mergekit":  # README's example
        (table,) = blocks(TEXTS["README.md"], "text")
        assert table.splitlines()[-1] in [line.rstrip() for line in output.splitlines()]


@pytest.mark.slow
def test_the_page_after_the_repair_runs_as_printed(tmp_path: Path) -> None:
    """Its commands keep the gain of the repair, and upload to a mirror of the hub."""
    pytest.importorskip("llmcompressor", reason="not installed: nox -s after")
    with Mirror() as mirror:
        environment = mirror.environment(tmp_path / "home") | {"HF_TOKEN": "hf_test"}
        output = run(programs(TEXTS["after.md"]), tmp_path, environment)
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
    "my_pool": ("tasks.md", "own-task"),
    "my_texts": ("tasks.md", "own-text-task"),
    "my_models": ("fusionbench.md", "folders"),
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
            if len(words) == 1 and words[0] not in ("--help", "ls", "suite"):  # only mentioned
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
    heads = re.findall(r"^\| (`[^|]*`) \|", TEXTS["comparison.md"], re.MULTILINE)
    assert len(rows) > 25 and {*rows} <= {name for head in heads for name in INLINE.findall(head)}
