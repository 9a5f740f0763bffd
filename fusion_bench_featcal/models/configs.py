"""Configs of several models, compared with each other."""

from collections.abc import Mapping

from fusion_bench_featcal.experts.model_config import check_same_function


def compare_configs(configs: Mapping[str, object]) -> None:
    """Compare the configs of several models with the first one that is not None.

    Args:
        configs: Name of a model in messages -> its config, the reference first.

    Raises:
        CalibrationError: As `check_same_function`.
    """
    present = {label: config for label, config in configs.items() if config is not None}
    first = next(iter(present), "")
    for label, config in [*present.items()][1:]:
        check_same_function(label, config, present[first], other=first)
