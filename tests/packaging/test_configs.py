"""Every YAML composes wherever the command starts. Its targets exist and take their keys."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from configs import REPOSITORY, composed
from golden import golden_surface
from golden.make import load
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object
from omegaconf import OmegaConf

import fusion_bench_featcal.compat  # noqa: F401

CHOSEN = ("method", "modelpool", "taskpool")  # by the user; other groups are included by these
HYDRA_KEYS = {"_target_", "_recursive_", "_partial_", "_convert_", "_args_", "_usage_", "_version_"}
# Keys that FusionBench's pools pass by: they are read from the config, by our algorithm or (as
# base_model) by other keys of the same file; `debug` by the console.
READ_FROM_CONFIG = {"default_taskpool", "featcal", "base_model", "debug"}
LITERAL = ("method=featcal", "modelpool=clip-vit-base-patch32_TA8")


def resolved(option: str) -> Any:
    """A composed YAML among the program's other keys, with all interpolations resolved."""
    group, *folders = option.split("/")[:-1]
    program, config = composed(), golden_surface.composed()[option][group]
    for folder in folders:  # composed by its whole name, a config lies as deep as its file
        config = config[folder]
    OmegaConf.set_struct(program, False)
    program[group] = config
    return OmegaConf.to_container(program[group], resolve=True)


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


def test_keys_and_values_are_the_golden_ones():
    result, golden = golden_surface.configs(), load("configs")
    assert sorted(result) == sorted(golden)
    for option, content in golden.items():
        assert result[option] == content, option


@pytest.mark.parametrize("group", CHOSEN)
def test_every_target_takes_its_keys(group: str):
    for option in golden_surface.composed():
        if not option.startswith(f"{group}/"):
            continue
        config = resolved(option)
        assert "_target_" in config, option
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


@pytest.mark.parametrize(
    "name", ["base-patch32_TA8", "base-patch16_TALL14", "large-patch14_TALL20"]
)
def test_alias_pool_is_the_original_with_a_task_pool_that_fits(name: str):
    alias: Any = resolved(f"modelpool/clip-vit-{name}")
    config = composed(f"modelpool=CLIPVisionModelPool/clip-vit-{name}").modelpool
    original: Any = OmegaConf.to_container(config, resolve=True)
    task_pool = alias.pop("default_taskpool")
    assert alias.pop("featcal") == {"compare_with": ["experts", "merged"]}
    assert alias == original
    assert task_pool["_target_"] == "fusion_bench_featcal.tasks.ClipTaskPool"
    assert task_pool["test_datasets"] == original["test_datasets"]
    assert task_pool["base_model"] == f"openai/clip-vit-{name.partition('_')[0]}"
    assert [task_pool[key] for key in ("clip_model", "processor", "data_processor")] == [None] * 3


@pytest.mark.parametrize("start", ["empty", "repository", "own_config"])
def test_the_literal_command_composes_from_any_folder(start, tmp_path, monkeypatch):
    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert names.count("FeatCalSearchPath") == 1
    monkeypatch.chdir(REPOSITORY if start == "repository" else tmp_path)
    if start == "own_config":
        (tmp_path / "config" / "method").mkdir(parents=True)
        (tmp_path / "config" / "method" / "mine.yaml").write_text("scale: 1\n")
    config = composed(*LITERAL)
    assert config.method._target_ == "fusion_bench_featcal.algorithm.FeatCalAlgorithm"
    assert config.modelpool.models._pretrained_ == "openai/clip-vit-base-patch32"
    if start == "own_config":  # which comes first
        (tmp_path / "config" / "method" / "featcal.yaml").write_text("mine: true\n")
        assert composed("method=featcal").method == {"mine": True}
