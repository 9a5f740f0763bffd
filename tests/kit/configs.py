"""Configs of FusionBench's program, composed and run as the command line does."""

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from fusion_bench_featcal.fusionbench.plan_run import plan_run as plan_run  # loads the plugin

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = REPOSITORY / "config"


@contextmanager
def composing() -> Iterator[None]:
    """Let Hydra compose in FusionBench's folder, a third faster by libyaml's parser."""
    folder = str(get_default_config_path())
    with (
        mock.patch.object(yaml, "SafeLoader", yaml.CSafeLoader),
        initialize_config_dir(folder, version_base=None),
    ):
        yield


def composed(*words: str) -> Any:
    """The config of `fusion_bench` with these overrides, started in the current folder."""
    return copy.deepcopy(_composed(words, Path.cwd()))


@cache
def _composed(words: tuple[str, ...], folder: Path) -> Any:
    with composing():
        return compose("fabric_model_fusion", overrides=list(words))


@cache
def own_configs() -> dict[str, Any]:
    """Every YAML of the package composed once: option -> config with its interpolations."""
    options = [p.relative_to(CONFIG).with_suffix("").as_posix() for p in CONFIG.rglob("*.yaml")]
    with composing():
        return {option: compose(option) for option in sorted(options)}


@contextmanager
def as_job(folder: Path, *words: str) -> Iterator[Any]:
    """Context in which a composed config is that of Hydra's running job, which logs to a folder."""
    quiet = ("print_config=false", "report_save_path=null")  # that file stays open
    with composing():
        config = compose("fabric_model_fusion", [*quiet, *words], return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.cwd = config.hydra.runtime.output_dir = str(folder)
        config.hydra.job.config_name = "fabric_model_fusion"
        config.path.log_dir = str(folder)
        HydraConfig.instance().set_config(OmegaConf.create({"hydra": config.pop("hydra")}))
    try:
        with mock.patch("fusion_bench.utils.instantiate_utils.PRINT_FUNCTION_CALL", False):
            yield config
    finally:
        HydraConfig.instance().cfg = None


def yaml_of_page(page: str, mark: str) -> str:
    """YAML of a page of the documentation below the comment `<!-- mark -->`."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- {mark} -->\n```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return block
