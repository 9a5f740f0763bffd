"""Configs of FusionBench's program, composed as the command line does."""

from typing import Any

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir


def composed(*words: str) -> Any:
    """The config of `fusion_bench` with these overrides."""
    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        return compose("fabric_model_fusion", overrides=list(words))
