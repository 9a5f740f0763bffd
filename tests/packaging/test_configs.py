"""Every YAML composes and its targets take its keys, and every command of the docs can be typed."""

import inspect
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from configs import REPOSITORY, composed, own_configs
from golden import golden_surface
from golden.make import load
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object
from omegaconf import OmegaConf

from fusion_bench_featcal.cli import _parser

CHOSEN = ("method", "modelpool", "taskpool")  # by the user; other groups are included by these
HYDRA_KEYS = {"_target_", "_recursive_", "_partial_", "_convert_", "_args_", "_usage_", "_version_"}
# Keys that FusionBench's pools pass by: they are read from the config, by our algorithm or (as
# base_model) by other keys of the same file; `debug` by the console.
READ_FROM_CONFIG = {"default_taskpool", "featcal", "base_model", "debug"}


# --- YAMLs ---


def targets(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings with a `_target_` in a config, at any depth."""
    if isinstance(node, dict) and "_target_" in node:
        yield node
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from targets(child)


def accepted_keys(target: Any) -> set[str] | None:
    """Keys a callable takes by name, or None if it takes any (a function with **kwargs)."""
    constructors = [target]
    if inspect.isclass(target):
        constructors = [c.__init__ for c in target.__mro__ if "__init__" in vars(c)]
    # FusionBench's serialisable classes name keys here that reach **kwargs.
    names = set(getattr(target, "_config_mapping", {}).values())
    for constructor in constructors:
        parameters = inspect.signature(constructor).parameters.values()
        names |= {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return names
    return names if inspect.isclass(target) else None


def test_groups_are_those_of_fusion_bench_and_hydra():
    groups = {option.partition("/")[0] for option in own_configs()}
    assert groups == {"method", "modelpool", "taskpool", "dataset", "hydra"}


def test_keys_and_values_are_the_golden_ones():
    result, golden = golden_surface.configs(), load("configs")
    assert sorted(result) == sorted(golden)
    for option, content in golden.items():
        assert result[option] == content, option


@pytest.mark.parametrize("group", CHOSEN)
def test_every_target_takes_its_keys(group: str, tmp_path, monkeypatch):
    for name in ("minilm", "dinov2-small", "smollm2"):  # weights that are fetched elsewhere
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    monkeypatch.setenv("FEATCAL_REAL", str(tmp_path))
    for option in own_configs():
        if not option.startswith(f"{group}/"):
            continue
        program = composed()
        OmegaConf.set_struct(program, False)
        program[group] = own_configs()[option][group]
        for folder in option.split("/")[1:-1]:  # a config lies as deep as its file
            program[group] = program[group][folder]
        config = OmegaConf.to_container(program[group], resolve=True)
        assert isinstance(config, dict) and "_target_" in config, option
        for node in targets(config):
            target = get_object(node["_target_"])
            keys = node.keys() - HYDRA_KEYS
            accepted = accepted_keys(target)
            if accepted is not None:
                assert keys - accepted <= READ_FROM_CONFIG, (option, node["_target_"])
            # Required keys must be there: raises TypeError, naming the key.
            signature = inspect.signature(target)
            bind = signature.bind_partial if node.get("_partial_") else signature.bind
            bind(*node.get("_args_", ()), **{key: node[key] for key in keys})


def test_the_literal_command_composes_beside_configs_of_the_user(tmp_path, monkeypatch):
    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert names.count("FeatCalSearchPath") == 1
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config" / "method").mkdir(parents=True)
    config = composed("method=featcal", "modelpool=clip-vit-base-patch32_TA8")
    assert config.method._target_ == "fusion_bench_featcal.algorithm.FeatCalAlgorithm"
    assert config.modelpool.models._pretrained_ == "openai/clip-vit-base-patch32"
    (tmp_path / "config" / "method" / "featcal.yaml").write_text("mine: true\n")
    assert composed("method=featcal").method == {"mine": True}  # the user's come first


# --- commands of README.md and docs/ ---

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


def first_job(words: list[str]) -> list[str]:
    """Overrides of a command, of the first job of a sweep."""
    if "-m" not in words:
        return words
    overrides = OverridesParser.create().parse_overrides([w for w in words if w != "-m"])
    return [
        f"{str(o.input_line).partition('=')[0]}={next(o.sweep_string_iterator())}"
        if o.is_sweep_override()
        else str(o.input_line)
        for o in overrides
        if not str(o.input_line).startswith("hydra")
    ]


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


@pytest.mark.usefixtures("folder_with_pools")
def test_every_command_is_valid():
    lines = [" ".join(words) for words in COMMANDS]
    assert "fusion_bench method=featcal modelpool=clip-vit-mini_TA6" in lines
    assert sum(line.startswith("fusion_bench") for line in lines) >= 30
    for program, *words in COMMANDS:
        if program != "featcal":
            composed(*first_job([word for word in words if not word.startswith("--")]))
            continue
        if len(words) == 1 and words[0] not in ("--help", "suite"):  # only mentioned
            words += ["featcal", *(["--out", "DIR"] if words[0] == "calibrate" else [])]
        options = _parser().parse_args(words)
        if any("=" in word for word in getattr(options, "words", ())):
            composed(*options.words)
