"""Plans of FusionBench runs: from command-line overrides, and at the start of a run."""

import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from fusion_bench.utils.hydra_utils import get_default_config_path
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from fusion_bench_featcal.experts import hollow_copy, known_bytes
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.feature_shapes import LENGTH, length_for, needs_length, takes_images
from fusion_bench_featcal.fusionbench.config_errors import explained
from fusion_bench_featcal.fusionbench.console import make_importable
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    PLAIN_OPTIONS,
)
from fusion_bench_featcal.fusionbench.run_results import method_name
from fusion_bench_featcal.fusionbench.upstream import budget_left
from fusion_bench_featcal.hub_files import is_here
from fusion_bench_featcal.plan import Plan, one_line, plan_of, warnings_of
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
        overrides: Overrides such as `modelpool=clip-vit-base-patch32_TA8`; without `method=` the
            method is featcal.
        length: Tokens of a text; None: `method.max_length`, else 512. For images whose size is not
            in the model's config, as of ResNet: their side in pixels.
        target_length: Tokens of an encoder-decoder's target.
        device: Device of the calibration.

    Raises:
        ValueError: If the overrides do not compose, the base model's config or the size of its
            images is unknown, or the upstream merger exceeds a read budget.
    """
    method, models, fabric = _composed(overrides)
    target = str(method.get("_target_", ""))
    if not target.endswith(".FeatCalAlgorithm"):
        raise ValueError(
            f"there are plans of method=featcal only, not of {target or method.get('name')}"
        )
    names = FeatCalSettings.names()
    settings = checked_settings({key: value for key, value in method.items() if key in names})
    base = models.get(BASE_MODEL)
    experts = [entry for name, entry in models.items() if not name.startswith("_")]
    if not experts:
        raise ValueError("modelpool.models names no expert")
    model = empty_model(_location_of(models.get(MERGED_MODEL) if base is None else base))
    sources = [_source_of(entry) for entry in experts]
    merger = method.get("base_method")
    if merger is not None and settings.expert_read_budget is not None:
        whole = sum(value.nbytes for value in model.state_dict().values())
        read = sum(whole if s is None else sum(map(s.nbytes, s.names())) for s in sources)
        try:
            left = budget_left(settings.expert_read_budget, read, method_name(merger))
        except CalibrationError as error:
            raise ValueError(str(error)) from error
        settings = settings.replace(expert_read_budget=left)
    neighbours = _devices(fabric.get("devices", 1), device := torch.device(device))
    return Request(
        model=model,
        settings=settings,
        tasks=len(experts),
        length=length_for(model, length, settings.max_length),
        target_length=target_length,
        held=sum(not _streams(entry, settings) for entry in experts),
        base_held=base is not None and not _streams(base, settings),
        itemsize=stored_itemsize(sources[0]),
        device=device,
        fetches=sum(map(_is_fetched, [*experts, *([] if base is None else [base])])),
        processes=neighbours * int(fabric.get("num_nodes", 1)),
        neighbours=neighbours,
    )


def _composed(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return plain values of a run's method, models and processes.

    Raises:
        ValueError: If the overrides compose no run with a model pool.
    """
    make_importable(os.getcwd())  # as in the run itself: `_target_` may name a class there
    words = list(overrides)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    try:
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            config = compose("fabric_model_fusion", overrides=words)
        # Only these keys of fabric: its loggers need a running program.
        fabric = OmegaConf.masked_copy(
            config.fabric or OmegaConf.create(), ["devices", "num_nodes"]
        )
        sections = config.method, config.modelpool.models, fabric
        return [dict(OmegaConf.to_container(section, resolve=True)) for section in sections]  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def known_samples(batches: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the number of samples per task; empty if it is unknown for a task."""
    counts = [len(task.indices) for task in batches.values() if hasattr(task, "indices")]
    return tuple(counts) if len(counts) == len(batches) else ()


def log_plan(
    merged: nn.Module, settings: FeatCalSettings, tasks: int, device: torch.device, **more: Any
) -> Plan | None:
    """Log the plan of a run that starts, with warnings if memory is short.

    Args:
        merged: The merged model.
        settings: Settings of the calibration.
        tasks: Number of tasks.
        device: Device of the calibration.
        **more: Further attributes of the `Request`.

    Returns:
        The plan; None without a known size of inputs (`method.max_length` is not set, say).
    """
    if needs_length(merged) and (settings.max_length is None or takes_images(merged)):
        return None
    more = {"loaded": 1, "length": settings.max_length or LENGTH, **more}
    model = hollow_copy(merged).to("meta")
    try:
        plan = plan_of(Request(model, settings, tasks, device=device, **more))
    except Exception as error:  # a plan is no reason to stop: the calibration reports errors
        log.debug("no plan of reads and memory: %s", error)
        return None
    log.info(one_line(plan))
    for warning in warnings_of(plan):
        log.warning(warning)
    return plan


def stored_itemsize(source: Any) -> int | None:
    """Return the bytes per number in a source's files; None: unknown."""
    try:
        name = min(source.names())
        return known_bytes(source, name) // math.prod(source.shape(name))
    except (AttributeError, ValueError, ZeroDivisionError, CalibrationError):
        return None


def _location_of(entry: Any) -> str:
    """Return the folder or hub id in a model pool's entry."""
    keys = ("pretrained_model_name_or_path", "base_model_path")
    if isinstance(entry, Mapping):
        entry = next((entry[key] for key in keys if key in entry), None)
    if not isinstance(entry, str):
        raise ValueError(
            "modelpool.models._pretrained_ names no folder or hub id, whose config is needed"
        )
    return entry


def _source_of(entry: Any) -> SafetensorsExpert | None:
    """Return an entry's safetensors files; None if it is no folder with such files."""
    try:
        return SafetensorsExpert(Path(_location_of(entry)))
    except (OSError, ValueError, CalibrationError):
        return None


def _is_fetched(entry: Any) -> bool:
    """Return whether an entry is a model that must be fetched from the hub."""
    try:
        location = _location_of(entry)
    except ValueError:
        return False
    return not is_here(location)


def _streams(entry: Any, settings: FeatCalSettings) -> bool:
    """Return whether calibration will read a model block by block, judged by its entry."""
    if settings.stream_experts is False:
        return False
    if isinstance(entry, Mapping):
        plain = "pretrained_model_name_or_path" in entry and not set(entry) - PLAIN_OPTIONS
        return plain or "peft_model_path" in entry
    return isinstance(entry, str) and (not Path(entry).is_dir() or _source_of(entry) is not None)


def _devices(asked: Any, device: torch.device) -> int:
    """Return the number of devices per machine that Fabric would use, one process each."""
    if asked is None or str(asked) in ("auto", "-1"):
        return max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
    names = asked.split(",") if isinstance(asked, str) and "," in asked else asked
    count = len([*filter(str.strip, map(str, names))]) if isinstance(names, list) else int(asked)
    if count < 1:
        raise ValueError(f"fabric.devices = {asked!r} names no device")
    return count
