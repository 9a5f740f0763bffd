"""Every YAML that is shipped composes, and what it names exists and takes the keys it is given."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from composing import OUR_CONFIG, compose_here
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

import fusion_bench_featcal.compat  # noqa: F401

CHOSEN = ("method", "modelpool", "taskpool")  # by the user; other groups are included by these
OPTIONS = [
    (str(p.parts[0]), str(p.relative_to(p.parts[0]).with_suffix("")))
    for p in sorted(f.relative_to(OUR_CONFIG) for f in OUR_CONFIG.rglob("*.yaml"))
    if p.parts[0] not in ("hydra", "featcal_callback")  # all methods' YAMLs include them
]
HYDRA_KEYS = {"_target_", "_recursive_", "_partial_", "_convert_", "_args_", "_usage_", "_version_"}
# Keys that FusionBench's pools pass by: they are read from the config, by our algorithm or (as
# base_model) by other keys of the same file; `debug` by the console.
READ_FROM_CONFIG = {"default_taskpool", "featcal", "base_model", "debug"}


def resolved(config: DictConfig) -> dict[str, Any]:
    """The config as plain values."""
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@cache
def composed(group: str, override: str) -> dict[str, Any]:
    """A group of the program's config, from a folder without configs of its own."""
    return resolved(compose_here(override)[group])


def targets(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings with a `_target_` in a config, at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for child in node.values():
            yield from targets(child)
    elif isinstance(node, list):
        for child in node:
            yield from targets(child)


def known_keys(target: Any) -> set[str] | None:
    """Keys a callable takes by name; None where any goes (a function with **kwargs)."""
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


@pytest.mark.parametrize(
    ("target", "taken", "misspelt"),
    [
        ("fusion_bench.modelpool.CLIPVisionModelPool", "train_datasets", "train_dataset"),
        ("fusion_bench.taskpool.CLIPVisionModelTaskPool", "fast_dev_run", "fast_devrun"),
        ("fusion_bench_featcal.algorithm.FeatCalAlgorithm", "ridge_lambda", "lambda"),
    ],
)
def test_misspelt_keys_are_told_apart(target, taken, misspelt):
    known = known_keys(get_object(target))
    assert known is not None
    assert taken in known
    assert misspelt not in known


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_composes_and_every_target_takes_its_keys(group, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    override = f"{group}={option}" if group in CHOSEN else f"+{group}={option}"
    config = composed(group, override)
    assert "_target_" in config or group not in CHOSEN
    for node in targets(config):
        target = get_object(node["_target_"])
        keys = node.keys() - HYDRA_KEYS
        known = known_keys(target)
        if known is not None:
            assert keys - known <= READ_FROM_CONFIG, node["_target_"]
        # What is required must be there: raises TypeError, naming the key.
        signature = inspect.signature(target)
        bind = signature.bind_partial if node.get("_partial_") else signature.bind
        bind(*node.get("_args_", ()), **{key: node[key] for key in keys})


@pytest.mark.parametrize("backbone", ["base-patch32", "base-patch16", "large-patch14"])
@pytest.mark.parametrize("suite", ["TA8", "TALL14", "TALL20"])
def test_alias_pool_is_the_original_with_a_task_pool_that_fits(
    backbone, suite, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name = f"clip-vit-{backbone}_{suite}"
    alias = dict(composed("modelpool", f"modelpool={name}"))
    original = composed("modelpool", f"modelpool=CLIPVisionModelPool/{name}")
    task_pool = alias.pop("default_taskpool")
    assert alias.pop("featcal") == {"compare_with": ["experts", "merged"]}
    assert alias == original
    assert task_pool["_target_"] == "fusion_bench_featcal.tasks.ClipTaskPool"
    assert task_pool["test_datasets"] == original["test_datasets"]
    assert task_pool["base_model"] == f"openai/clip-vit-{backbone}"
    assert [task_pool[key] for key in ("clip_model", "processor", "data_processor")] == [None] * 3
