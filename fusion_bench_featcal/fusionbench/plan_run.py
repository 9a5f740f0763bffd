"""Plans of FusionBench runs: for command-line overrides, and at the start of a run."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fusion_bench import BaseModelPool
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from fusion_bench_featcal.experts import hollow_copy, known_bytes
from fusion_bench_featcal.feature_shapes import LENGTH, takes_images
from fusion_bench_featcal.fusionbench.config_errors import explained
from fusion_bench_featcal.fusionbench.console import make_importable
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.options import checked_settings, method_name
from fusion_bench_featcal.fusionbench.pool_models import MERGED_MODEL, PoolModel, PoolModels
from fusion_bench_featcal.fusionbench.upstream import budget_left
from fusion_bench_featcal.hub_files import is_here
from fusion_bench_featcal.plan import Plan, check, one_line, plan_of
from fusion_bench_featcal.plan_shapes import Request
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


def run_request(
    overrides: Sequence[str],
    *,
    length: int | None = None,
    target_length: int = 8,
    device: torch.device | str = "cpu",
) -> Request:
    """Return the request for the plan of a run with these command-line overrides.

    Only configs and headers of files are read. Nothing is downloaded.

    Args:
        overrides: Overrides such as `modelpool=clip-vit-base-patch32_TA8`. Without `method=` the
            method is featcal.
        length: Tokens of a text, by default `method.max_length` or else 512. For image models whose
            config has no image size (ResNet), the side in pixels.
        target_length: Tokens of an encoder-decoder's target.
        device: Device of the calibration.

    Raises:
        ValueError: If the overrides do not compose, or the base model's config or the size of its
            images is unknown.
        CalibrationError: If the upstream merger exceeds a read budget, or a file is damaged.
    """
    method, models, devices = _composed(overrides)
    target = str(method.get("_target_", ""))
    if not target.endswith(".FeatCalAlgorithm"):
        raise ValueError(
            f"there are plans of method=featcal only, not of {target or method.get('name')}"
        )
    names, experts, base = FeatCalSettings.names(), [*models.experts.values()], models.base
    if not experts:
        raise ValueError("modelpool.models names no expert")
    settings = checked_settings({key: value for key, value in method.items() if key in names})
    location = (base or models.get(MERGED_MODEL) or experts[0]).location
    if location is None:
        raise ValueError("modelpool.models._pretrained_ names no folder or hub id with a config")
    model = empty_model(location)
    merger = method.get("base_method")
    if merger is not None and settings.expert_read_budget is not None:
        size = sum(value.nbytes for value in model.state_dict().values())
        read = sum((_is_local(expert) and expert.file_bytes) or size for expert in experts)
        rest = budget_left(settings.expert_read_budget, read, method_name(merger))
        settings = settings.replace(expert_read_budget=rest)
    used = [*experts, *([base] if base else [])]
    return Request(
        model=model,
        settings=settings,
        tasks=len(experts),
        length=length or settings.max_length or (None if takes_images(model) else LENGTH),
        target_length=target_length,
        whole=sum(not _streams(entry, settings) for entry in used),
        itemsize=stored_itemsize(experts[0].files) if _is_local(experts[0]) else None,
        device=torch.device(device),
        fetches=sum(not all(map(is_here, entry.locations.values())) for entry in used),
        processes=_processes(devices),
    )


def _composed(overrides: Sequence[str]) -> tuple[dict[str, Any], PoolModels, Any]:
    """Return a run's method, its models and `fabric.devices`.

    Raises:
        ValueError: If the overrides do not compose a run with a model pool.
    """
    make_importable(os.getcwd())  # as in the run: `_target_` may name a class in this folder
    words = list(overrides)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    try:
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            config = compose("fabric_model_fusion", overrides=words)
        method: Any = OmegaConf.to_container(config.method, resolve=True)
        OmegaConf.resolve(config.modelpool.models)
        devices = OmegaConf.select(config, "fabric.devices", default=1)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error
    return method, PoolModels(BaseModelPool(config.modelpool.models)), devices


def numbers_of_samples(batches: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of samples per task, or nothing if any is unknown."""
    counts = [len(task.indices) for task in batches.values() if hasattr(task, "indices")]
    return tuple(counts) if len(counts) == len(batches) else ()


def log_plan(
    merged: nn.Module, settings: FeatCalSettings, tasks: int, device: torch.device, **more: Any
) -> Plan | None:
    """Log the plan of a starting run, with warnings if memory is short.

    Args:
        merged: The merged model.
        settings: Settings of the calibration.
        tasks: Number of tasks.
        device: Device of the calibration.
        **more: Further attributes of the `Request`.

    Returns:
        The plan, or None if the size of inputs is unknown, as without `method.max_length`.

    Raises:
        CalibrationError: If memory or a disk is too small.
    """
    model = hollow_copy(merged).to("meta")
    try:
        plan = plan_of(Request(model, settings, tasks, settings.max_length, device=device, **more))
    except Exception as error:  # a failed plan does not stop a run: the calibration reports errors
        log.debug("no plan of reads and memory: %s", error)
        return None
    log.info(one_line(plan))
    for warning in check(plan):
        log.warning(warning)
    return plan


def stored_itemsize(source: Any) -> int | None:
    """Return the bytes per number in a source's files, or None if unknown."""
    try:
        name = min(source.names())
        return known_bytes(source, name) // math.prod(source.shape(name))
    except (AttributeError, ValueError, ZeroDivisionError, CalibrationError):
        return None


def _is_local(model: PoolModel) -> bool:
    """Return whether a model's files are in folders, not in the hub's cache."""
    return bool(model.locations) and all(map(os.path.isdir, model.locations.values()))


def _streams(model: PoolModel, settings: FeatCalSettings) -> bool:
    """Return whether calibration will read a model block by block, according to its entry."""
    if settings.stream_experts is False or not model.locations:
        return False
    return not _is_local(model) or model.files is not None


def _processes(devices: Any) -> int:
    """Return the number of processes that Fabric starts, one for each device."""
    if OmegaConf.is_list(devices):
        return len(devices)
    return int(devices) if str(devices).isdigit() else 1
