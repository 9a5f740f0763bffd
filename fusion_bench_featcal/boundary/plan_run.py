"""The plan of a run that is named as on FusionBench's command line, from configs and headers."""

import logging
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fusion_bench_featcal.boundary.fusing import merger_class
from fusion_bench_featcal.boundary.preflight_pool import (
    LENGTH,
    compose_run,
    location_of,
    settings_among,
)
from fusion_bench_featcal.boundary.results import method_name
from fusion_bench_featcal.experts import hollow_copy, known_bytes
from fusion_bench_featcal.experts_files import safetensors_files
from fusion_bench_featcal.plan.prediction import Plan, Request, predict
from fusion_bench_featcal.plan.rates import Rates, measure_rates
from fusion_bench_featcal.plan.show import one_line, warnings_of
from fusion_bench_featcal.preflight import empty_model
from fusion_bench_featcal.reads.plan import budget_left
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

_PLAIN = {"_target_", "pretrained_model_name_or_path", "torch_dtype", "dtype"}
_ITEMSIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def run_request(
    overrides: Sequence[str],
    *,
    length: int | None = None,
    target_length: int = 8,
    device: torch.device | str = "cpu",
) -> Request:
    """What a run's plan is made from.

    Args:
        overrides: Words of the command line, such as `modelpool=clip-vit-base-patch32_TA8`.
        length: Tokens of a text; None: `method.max_length`, else 512.
        target_length: Tokens of an encoder-decoder's target.
        device: Where to calibrate.

    Returns:
        The request.

    Raises:
        ValueError: If the words name no run, or the base model's configuration cannot be found.
    """
    method, models, fabric = compose_run(overrides)
    target = str(method.get("_target_", ""))
    if not target.endswith(".FeatCalAlgorithm"):
        raise ValueError(
            f"there are plans of method=featcal only, not of {target or method.get('name')}"
        )
    settings = settings_among(method)
    model = empty_model(location_of(models.get("_pretrained_", models.get("_merged_"))))
    experts = [entry for name, entry in models.items() if not name.startswith("_")]
    if not experts:
        raise ValueError("modelpool.models names no expert")
    held = sum(not _streams(entry, settings) for entry in experts)
    base = models.get("_pretrained_")
    base_held = base is not None and not _streams(base, settings)
    devices = _devices(fabric["devices"], torch.device(device))
    processes = devices * int(fabric["num_nodes"])
    fused = processes == 1 and not held and not base_held and _fuses(method)
    merger = method.get("base_method")
    if merger is not None and settings.expert_read_budget is not None:
        settings = _beside_merger(settings, merger, model, experts, fused=fused)
    return Request(
        model=model,
        settings=settings,
        tasks=len(experts),
        length=length or settings.max_length or LENGTH,
        target_length=target_length,
        held=held,
        base_held=base_held,
        itemsize=_itemsize(experts[0]),
        device=torch.device(device),
        fused=fused,
        merges=merger is not None,
        processes=processes,
        neighbours=devices,
    )


def _devices(asked: Any, device: torch.device) -> int:
    """How many devices of a machine Fabric would take, one process each.

    Raises:
        ValueError: If it would take none.
    """
    if asked is None or str(asked) in ("auto", "-1"):
        return max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
    if isinstance(asked, list):
        count = len(asked)
    elif "," in str(asked):
        count = sum(bool(part.strip()) for part in asked.split(","))
    else:
        count = int(asked)
    if count < 1:
        raise ValueError(f"fabric.devices = {asked!r} names no device")
    return count


def takes_text(model: nn.Module) -> bool:
    """Whether a model's inputs are tokens."""
    return getattr(model, "main_input_name", None) == "input_ids"


def _streams(entry: Any, settings: FeatCalSettings) -> bool:
    """Whether calibration reads a model block by block, as far as its entry tells."""
    if settings.stream_experts is False:
        return False
    if isinstance(entry, Mapping):
        is_adapter = "peft_model_path" in entry
        return is_adapter or ("pretrained_model_name_or_path" in entry and not set(entry) - _PLAIN)
    return isinstance(entry, str) and not (Path(entry).is_dir() and not _files(Path(entry)))


def _fuses(method: Mapping[str, Any]) -> bool:
    """Whether the upstream merge will share the calibration's reads, as far as its entry tells."""
    merger = merger_class(method.get("base_method") or {})
    return merger is not None and method.get("fuse_merge", "auto") == "auto"


def _beside_merger(
    settings: FeatCalSettings, merger: Any, model: nn.Module, experts: Sequence[Any], *, fused: bool
) -> FeatCalSettings:
    """Settings with what the upstream merger leaves of the read budget.

    Raises:
        ValueError: If it leaves nothing.
    """
    assert settings.expert_read_budget is not None
    whole = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    sizes = [sum(path.stat().st_size for path in _files_of(entry)) for entry in experts]
    upstream = sum(size or whole for size in sizes)
    try:
        left = budget_left(settings.expert_read_budget, upstream, method_name(merger), fused=fused)
    except CalibrationError as error:
        raise ValueError(str(error)) from error
    return settings.replace(expert_read_budget=left)


def _files_of(entry: Any) -> list[Path]:
    try:
        return _files(Path(location_of(entry)))
    except ValueError:
        return []


def _files(folder: Path) -> list[Path]:
    try:
        return safetensors_files(folder)
    except (OSError, CalibrationError):
        return []


def _itemsize(entry: Any) -> int | None:
    """Bytes of a number in an expert's files, from a header; None: not known."""
    try:
        with safe_open(_files_of(entry)[0], framework="pt") as handle:
            names = list(handle.keys())
            return _ITEMSIZES.get(handle.get_slice(names[0]).get_dtype())
    except (ValueError, OSError, IndexError, SafetensorError):
        return None


def stored_itemsize(model: Any) -> int | None:
    """Bytes of a number in a source's files, as its headers tell; None: not known."""
    try:
        name = min(model.names())
        return known_bytes(model, name) // math.prod(model.shape(name))
    except (AttributeError, ValueError, ZeroDivisionError, CalibrationError):
        return None


def log_plan(
    merged: nn.Module,
    settings: FeatCalSettings,
    tasks: int,
    device: torch.device,
    *,
    held: int = 0,
    base_held: bool = False,
    loaded: int = 1,
    itemsize: int | None = None,
    fused: bool = False,
    merges: bool = False,
    processes: int = 1,
    neighbours: int = 1,
) -> Plan | None:
    """Say at the start of a run what it will take, and warn where that is more than there is.

    Args:
        merged: The merged model.
        settings: Settings.
        tasks: Number of tasks.
        device: Where to calibrate.
        held: Number of experts that are loaded whole.
        base_held: Whether the base is.
        loaded: Number of models that are in memory already, the merged one among them.
        itemsize: Bytes of a number in the experts' files; None: as in the model.
        fused: Whether the upstream merge shares the calibration's reads.
        merges: Whether an upstream merger reads the experts, too.
        processes: Number of processes that work on it.
        neighbours: Number of those on this machine.

    Returns:
        The plan; None where none can be made, which is no reason not to run: of texts whose length
        nothing tells (`method.max_length`), or of a model of unknown inputs.
    """
    try:
        if settings.max_length is None and takes_text(merged):
            return None
        length = settings.max_length or LENGTH
        model = hollow_copy(merged).to("meta")
        request = Request(
            model, settings, tasks, length, held=held, base_held=base_held, itemsize=itemsize,
            loaded=loaded, device=device, fused=fused, merges=merges,
            processes=processes, neighbours=neighbours,
        )  # fmt: skip
        plan = predict(request, _quick_rates(device, settings.linear_kernel))
    except Exception as error:  # a model of unknown inputs: the calibration itself will tell
        log.debug("no plan of time and memory: %s", error)
        return None
    log.info(one_line(plan))
    for warning in warnings_of(plan):
        log.warning(warning)
    return plan


@cache
def _quick_rates(device: torch.device, linear_kernel: str) -> Rates:
    """The device's rates, measured once in a process."""
    return measure_rates(device, linear_kernel=linear_kernel, quick=True)
