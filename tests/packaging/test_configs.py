"""Every YAML composes, and its targets take its keys."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
from configs import composed, own_configs
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.utils import get_object
from omegaconf import OmegaConf

HYDRA_KEYS = {"_target_", "_recursive_", "_partial_", "_convert_", "_args_", "_usage_", "_version_"}
# Keys that FusionBench's pools pass by: they are read from the config, by our algorithm or (as
# base_model) by other keys of the same file; `debug` by the console.
READ_FROM_CONFIG = {"default_taskpool", "featcal", "base_model", "debug"}


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


@pytest.mark.slow
@pytest.mark.ci
def test_every_target_takes_its_keys():
    for option, config in own_configs().items():
        for node in targets(OmegaConf.to_container(config, resolve=False)):
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
