"""Every YAML composes wherever the command starts; its targets exist and take their keys."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from composing import OUR_CONFIG, REPOSITORY, compose_here
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object
from omegaconf import OmegaConf

import fusion_bench_featcal.compat  # noqa: F401
from fusion_bench_featcal.suites.paths import SUITE_ROOT

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
LITERAL = ("method=featcal", "modelpool=clip-vit-base-patch32_TA8")


@cache
def composed(group: str, override: str) -> dict[str, Any]:
    """A group of the program's config as plain values."""
    plain = OmegaConf.to_container(compose_here(override)[group], resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def targets(node: Any) -> Iterator[dict[str, Any]]:
    """All mappings with a `_target_` in a config, at any depth."""
    if isinstance(node, dict) and "_target_" in node:
        yield node
    if isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
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
    keys = known_keys(get_object(target)) or set()
    assert taken in keys and misspelt not in keys


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
        # Required keys must be there: raises TypeError, naming the key.
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


@pytest.mark.parametrize("start", ["empty", "repository", "own_config"])
def test_the_literal_command_composes_from_any_folder(start, tmp_path, monkeypatch):
    names = [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
    assert names.count("FeatCalSearchPath") == 1
    monkeypatch.chdir(REPOSITORY if start == "repository" else tmp_path)
    if start == "own_config":
        (tmp_path / "config" / "method").mkdir(parents=True)
        (tmp_path / "config" / "method" / "mine.yaml").write_text("scale: 1\n")
    config = compose_here(*LITERAL)
    assert config.method._target_ == "fusion_bench_featcal.algorithm.FeatCalAlgorithm"
    assert config.modelpool.models._pretrained_ == "openai/clip-vit-base-patch32"
    if start == "own_config":  # which comes first
        (tmp_path / "config" / "method" / "featcal.yaml").write_text("mine: true\n")
        assert compose_here("method=featcal").method == {"mine": True}


@pytest.mark.parametrize("method", ["ties_merging", "wudi/wudi", "simple_average", None])
def test_upstream_mergers_of_other_names_or_none(method, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    change = f"method@method.base_method={method}" if method else "method.base_method=null"
    expected = compose_here(f"method={method}").method if method else None
    assert compose_here(*LITERAL, change).method.base_method == expected


def test_suite_resolver_gives_a_path_in_the_package():
    compose_here()
    config = OmegaConf.create({"data": "${featcal_suite:images/mini_mnist.npz}"})
    assert config.data == str(SUITE_ROOT / "images" / "mini_mnist.npz")
