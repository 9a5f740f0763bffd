"""Configs of several models, compared with each other."""

from collections.abc import Container, Mapping
from typing import Any

from fusion_bench_featcal.experts.model_config import check_same_function


def compare_configs(configs: Mapping[str, Any], experts: Container[str]) -> None:
    """Compare the configs of several models with the first one that is not None.

    Args:
        configs: Model -> its config, the reference first.
        experts: The models that are experts.

    Raises:
        CalibrationError: As `check_same_function`.
    """
    first = next((name for name, config in configs.items() if config is not None), "")
    title = f"the {first.strip('_')} model".replace("the pretrained model", "the base")
    for name, config in configs.items():
        role = "expert" if name in experts else "model"
        check_same_function(f"{role} {name!r}", config, configs.get(first), other=title)
