"""Experts, data and settings that mergers and the anchor take from a FusionBench pool."""

from collections.abc import Callable, Sequence
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.families import check_family
from fusion_bench_featcal.fusionbench.options import plain, take_fusion_bench_keys
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models, check_pool_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model, pool_source
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

MERGER_SETTINGS = (
    "samples_per_task",
    "batch_size",
    "seed",
    "calibration_split",
    "modules",
    "family",
    "ignore_config",
    "stream_experts",
)
"""Fields of `FeatCalSettings` that the mergers have too, with the same meaning."""

ANCHOR_SETTINGS = ("anchor_rho", "calibrate_bias", "calibrate_norm", "modules", "family")
"""Fields of `FeatCalSettings` that its anchor alone depends on."""


def take_settings(
    algorithm: Any, values: dict[str, Any], known: Sequence[str], others: Sequence[str] = ()
) -> Any:
    """Check an algorithm's settings and set them as its attributes.

    Args:
        algorithm: A FusionBench method; `settings` and each known name are set on it.
        values: Values by name, as OmegaConf or plain objects.
        known: The fields of `FeatCalSettings` that it has.
        others: Its other keys, which may have been meant, too.

    Returns:
        The keys among the values that FusionBench's own constructor takes.

    Raises:
        ValueError: If a key is unknown, with the nearest one, or a value out of range.
    """
    meta = take_fusion_bench_keys(values)
    refuse_unknown_settings([key for key in values if key not in known], [*known, *others])
    settings = FeatCalSettings(**{k: plain(v) for k, v in values.items()})
    check_family(settings.family)
    algorithm.settings = settings
    for name in known:
        setattr(algorithm, name, getattr(settings, name))
    return meta


def merge_pool(
    merge: Callable[..., nn.Module],
    modelpool: BaseModelPool,
    settings: FeatCalSettings,
    fabric: Any,
    **options: Any,
) -> nn.Module:
    """Merge a pool's experts.

    Args:
        merge: `regmean`, `regmean_plusplus` or `lot`.
        modelpool: The pool with base, experts and data.
        settings: `MERGER_SETTINGS` are used.
        fabric: Lightning Fabric: the device and the precision.
        **options: The method's own options.

    Returns:
        The merged model.

    Raises:
        CalibrationError: If models or data are missing, or the merging cannot go on.
    """
    if fabric.world_size > 1:
        raise CalibrationError("this method runs on one device: set fabric.devices=1")
    check_base(modelpool)
    check_pool_models(modelpool, fabric)
    check_pool_settings(modelpool, settings)
    tasks, processor = modelpool.model_names, load_input_processor(modelpool)
    batches = calibration_batches(modelpool, tasks, settings, processor, device=fabric.device)
    stream = settings.stream_experts
    return merge(
        load_pool_model(modelpool, BASE_MODEL),
        {task: pool_source(modelpool, task, stream_experts=stream) for task in tasks},
        batches,
        settings,
        device=fabric.device,
        autocast=fabric.autocast,
        **options,
    )


def check_base(modelpool: BaseModelPool) -> None:
    """Refuse a pool without a base model.

    Raises:
        CalibrationError: If there is none, naming the setting.
    """
    if not modelpool.has_pretrained:
        raise CalibrationError(
            f"the pool has no base model: name it as modelpool.models.{BASE_MODEL}"
        )
