"""Configs of FusionBench's program, composed as the command line does."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir

import fusion_bench_featcal.fusionbench.plan_run  # noqa: F401  as FusionBench's command, see the plugin

REPOSITORY = Path(__file__).resolve().parents[2]


def composed(*words: str) -> Any:
    """The config of `fusion_bench` with these overrides, started in the current folder."""
    return copy.deepcopy(_composed(words, Path.cwd()))


@cache
def _composed(words: tuple[str, ...], folder: Path) -> Any:
    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        return compose("fabric_model_fusion", overrides=list(words))
