"""Composes configs as FusionBench's command line does when it is started in some folder."""

from pathlib import Path

from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

import fusion_bench_featcal.fusionbench.plan_run  # noqa: F401  as FusionBench's command, see the plugin

REPOSITORY = Path(__file__).resolve().parents[2]
OUR_CONFIG = REPOSITORY / "config"


def compose_here(*overrides: str) -> DictConfig:
    """The program's config, found from the current working directory."""
    primary = get_default_config_path()
    assert primary is not None
    with initialize_config_dir(str(primary), version_base=None):
        return compose("fabric_model_fusion", overrides=list(overrides))
