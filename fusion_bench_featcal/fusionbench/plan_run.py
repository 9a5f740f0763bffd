"""Plans of FusionBench runs: from the command line's words before a run, and at its start."""

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
from fusion_bench_featcal.fusionbench.console import explained
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.hydra_job import make_importable
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
    """Request for the plan of a run that is named as on FusionBench's command line.

    Only configs and headers of files are read; nothing is downloaded.

    Args:
        overrides: Words of the command line, such as `modelpool=clip-vit-base-patch32_TA8`.
        length: Tokens of a text; None: `method.max_length`, else 512. Of models of images whose
            config names no image size, as ResNet's: the side of an image in pixels.
        target_length: Tokens of an encoder-decoder's target.
        device: Where to calibrate.

    Raises:
        ValueError: If the words name no run, the base model's configuration cannot be found, the
            size of its images is unknown, or the upstream merger exceeds a read budget.
    """
    method, models, fabric = _composed(overrides)
    target = str(method.get("_target_", ""))
    if not target.endswith(".FeatCalAlgorithm"):
        raise ValueError(
            f"there are plans of method=featcal only, not of {target or method.get('name')}"
        )
    known = FeatCalSettings.names()
    settings = checked_settings({key: value for key, value in method.items() if key in known})
    base, merger = models.get(BASE_MODEL), method.get("base_method")
    model = empty_model(_location_of(models.get(MERGED_MODEL) if base is None else base))
    experts = [entry for name, entry in models.items() if not name.startswith("_")]
    if not experts:
        raise ValueError("modelpool.models names no expert")
    held = sum(not _streams(entry, settings) for entry in experts)
    base_held = base is not None and not _streams(base, settings)
    neighbours = _devices(fabric.get("devices", 1), device := torch.device(device))
    processes = neighbours * int(fabric.get("num_nodes", 1))
    sources = [_source_of(entry) for entry in experts]
    if merger is not None and settings.expert_read_budget is not None:
        whole = sum(value.nbytes for value in model.state_dict().values())
        read = sum(whole if s is None else sum(map(s.nbytes, s.names())) for s in sources)
        try:
            left = budget_left(settings.expert_read_budget, read, method_name(merger))
        except CalibrationError as error:
            raise ValueError(str(error)) from error
        settings = settings.replace(expert_read_budget=left)
    return Request(
        model=model,
        settings=settings,
        tasks=len(experts),
        length=length_for(model, length, settings.max_length),
        target_length=target_length,
        held=held,
        base_held=base_held,
        itemsize=stored_itemsize(sources[0]),
        device=device,
        fetches=sum(map(_is_fetched, [*experts, *([] if base is None else [base])])),
        processes=processes,
        neighbours=neighbours,
    )


def _compose(overrides: Sequence[str]) -> Any:
    """Compose a run; without `method=` the method is featcal.

    Raises:
        ValueError: If the words compose no run.
    """
    make_importable(os.getcwd())  # as in the run itself: `_target_` may name a class there
    words = list(overrides)
    if not any(word.startswith("method=") for word in words):
        words.append("method=featcal")
    try:
        with initialize_config_dir(str(get_default_config_path()), version_base=None):
            return compose("fabric_model_fusion", overrides=words)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def _composed(overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Compose a run: plain values of method, models of the pool, and fabric's processes.

    Raises:
        ValueError: If the words compose no run with a model pool.
    """
    config = _compose(overrides)
    try:
        # by name: Fabric's loggers need a running program
        given = config.fabric or {}
        fabric = {name: given[name] for name in ("devices", "num_nodes") if name in given}
        parts = config.method, config.modelpool.models, OmegaConf.create(fabric)
        return [dict(OmegaConf.to_container(part, resolve=True)) for part in parts]  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error) from error


def known_samples(batches: Mapping[str, Any]) -> tuple[int, ...]:
    """Number of each task's samples; empty where a task's batches do not tell it."""
    counts = [len(task.indices) for task in batches.values() if hasattr(task, "indices")]
    return tuple(counts) if len(counts) == len(batches) else ()


def log_plan(
    merged: nn.Module, settings: FeatCalSettings, tasks: int, device: torch.device, **known: Any
) -> Plan | None:
    """Log at the start of a run what it will take, and warn where that is more than there is.

    Returns:
        The plan, of a `Request` with the attributes `known` besides; None where none can be made,
        which is no reason not to run: of texts whose length is unknown (no `method.max_length`), of
        images whose size is, or of a model of unknown inputs.
    """
    if needs_length(merged) and (settings.max_length is None or takes_images(merged)):
        return None
    known = {"loaded": 1, "length": settings.max_length or LENGTH, **known}
    model = hollow_copy(merged).to("meta")
    request = Request(model, settings, tasks, device=device, **known)
    try:
        plan = plan_of(request)
    except Exception as error:  # a model of unknown inputs: the calibration itself will tell
        log.debug("no plan of reads and memory: %s", error)
        return None
    log.info(one_line(plan))
    for warning in warnings_of(plan):
        log.warning(warning)
    return plan


def stored_itemsize(source: Any) -> int | None:
    """Bytes of a number in a source's files, as its headers tell; None: not known."""
    try:
        name = min(source.names())
        return known_bytes(source, name) // math.prod(source.shape(name))
    except (AttributeError, ValueError, ZeroDivisionError, CalibrationError):
        return None


def _location_of(entry: Any) -> str:
    """The folder or hub id of a model pool's entry."""
    keys = ("pretrained_model_name_or_path", "base_model_path")
    if isinstance(entry, Mapping):
        entry = next((entry[key] for key in keys if key in entry), None)
    if not isinstance(entry, str):
        raise ValueError(
            "modelpool.models._pretrained_ names no folder or hub id, whose config is needed"
        )
    return entry


def _source_of(entry: Any) -> SafetensorsExpert | None:
    """An entry's safetensors files; None where it is no folder that holds some."""
    try:
        return SafetensorsExpert(Path(_location_of(entry)))
    except (OSError, ValueError, CalibrationError):
        return None


def _is_fetched(entry: Any) -> bool:
    """Tell whether an entry is a model of the hub that is not here."""
    try:
        location = _location_of(entry)
    except ValueError:
        return False
    return not is_here(location)


def _streams(entry: Any, settings: FeatCalSettings) -> bool:
    """Return whether calibration reads a model block by block, as far as its entry tells."""
    if settings.stream_experts is False:
        return False
    if isinstance(entry, Mapping):
        plain = "pretrained_model_name_or_path" in entry and not set(entry) - PLAIN_OPTIONS
        return plain or "peft_model_path" in entry
    return isinstance(entry, str) and (not Path(entry).is_dir() or _source_of(entry) is not None)


def _devices(asked: Any, device: torch.device) -> int:
    """Number of devices of a machine that Fabric would take, one process each."""
    if asked is None or str(asked) in ("auto", "-1"):
        return max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
    names = asked.split(",") if "," in str(asked) and isinstance(asked, str) else asked
    listed = isinstance(names, list)
    count = sum(bool(str(name).strip()) for name in names) if listed else int(asked)
    if count < 1:
        raise ValueError(f"fabric.devices = {asked!r} names no device")
    return count
