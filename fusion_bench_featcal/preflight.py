"""What a calibration will meet, told from a model's configuration alone: no weights are needed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.engine.modules import BlockModules, find_all_modules
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.settings import FeatCalSettings

KNOWN = Path(__file__).with_name("known_configs")
_STATISTICS = torch.float32  # what gram and cross moments are summed in


@dataclass(frozen=True)
class ModuleKind:
    """Modules of one name and shape.

    Attributes:
        name: Name inside the block.
        shape: `[out, in]`.
        count: In how many blocks there is one.
    """

    name: str
    shape: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class Preflight:
    """What a calibration will meet; sizes in bytes, at most.

    Attributes:
        model: The model's class.
        family: The family that cuts it into blocks.
        parameters: Its number of parameters, tied ones once.
        stages: Number of blocks in each stage.
        modules: The modules that are calibrated.
        left: Names inside the block of those with parameters that stay merged.
        model_bytes: The whole model.
        block_bytes: The largest block; that of the expert in hand is read besides.
        statistics_bytes: Of the largest block: one task's sums, the running sums over tasks and
            the right sides, as if no two modules shared an input.
        activation_bytes: Features of all samples at one block, of calibrated model and expert.
    """

    model: str
    family: str
    parameters: int
    stages: tuple[int, ...]
    modules: tuple[ModuleKind, ...]
    left: tuple[str, ...]
    model_bytes: int
    block_bytes: int
    statistics_bytes: int
    activation_bytes: int


def empty_model(location: str) -> nn.Module:
    """A model without weights, on the meta device, from its configuration.

    Args:
        location: Name of a configuration in this package (`flan-t5-base`, or a hub id that ends in
            it), a folder with `config.json`, or a hub id.

    Returns:
        The model, in the dtype that its configuration names.

    Raises:
        ValueError: If there is no such configuration (naming those in the package), or it is
            neither of a language model nor of CLIP.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSeq2SeqLM,
        CLIPVisionModel,
    )

    known = KNOWN / location.rstrip("/").rsplit("/", 1)[-1]
    place = location if Path(location).is_dir() or not known.is_dir() else str(known)
    try:
        config: Any = AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        names = ", ".join(sorted(path.name for path in KNOWN.iterdir()))
        raise ValueError(
            f"no configuration {location!r} ({str(error).splitlines()[0]}); give a folder with "
            f"config.json, a hub id, or one of {names}"
        ) from error
    if config.model_type in ("clip", "clip_vision_model"):
        with torch.device("meta"):
            return CLIPVisionModel(getattr(config, "vision_config", config)).eval()
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or torch.float32
    with torch.device("meta"):
        model: Any = kind.from_config(config).to(dtype).eval()
    # transformers 5 ties the head of every T5; that FLAN-T5's is not shows in another key then.
    if getattr(config, "scale_decoder_outputs", None) is False:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    return model


def preflight(
    model: nn.Module,
    settings: FeatCalSettings,
    *,
    tasks: int,
    length: int,
    target_length: int = 8,
) -> Preflight:
    """Count blocks, modules and bytes.

    Args:
        model: The model, on any device; nothing is computed.
        settings: `family`, `modules`, `calibrate_norm` and `samples_per_task` are used.
        tasks: Number of tasks.
        length: Length of a sample in tokens.
        target_length: Length of an encoder-decoder's target in tokens.

    Returns:
        The counts.

    Raises:
        CalibrationError: If a module cannot be calibrated.
        ValueError: If the family does not know the model.
    """
    family = resolve_family(settings.family, model)
    stages = family.stages(model)
    found = find_all_modules(model, stages, settings)
    config: Any = model.config
    lengths = [length] if len(stages) == 1 else [length, target_length]
    dtype = next(model.parameters()).dtype
    features = sum(lengths)  # decoder blocks are given the encoder's features besides their own
    width = getattr(config, "d_model", None) or config.hidden_size
    return Preflight(
        model=type(model).__name__,
        family=family.name,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        stages=tuple(map(len, stages)),
        modules=_kinds(model, found),
        left=tuple(sorted({_inside(n, b) for b, m in found.items() for n in m.left})),
        model_bytes=_bytes(model),
        block_bytes=max(_bytes(model.get_submodule(block)) for block in found),
        statistics_bytes=max(_statistics(model, modules) for modules in found.values()),
        activation_bytes=2 * tasks * settings.samples_per_task * features * width * dtype.itemsize,
    )


def describe(plan: Preflight) -> str:
    """The counts as lines of text."""
    lines = [
        f"{plan.model}, family {plan.family}: {plan.parameters:,} parameters",
        f"blocks: {' + '.join(map(str, plan.stages))}",
        *(f"  {k.count:>4} x {k.name} {list(k.shape)}" for k in plan.modules),
        f"left as merged: {', '.join(plan.left) or 'nothing'}",
        "memory, at most:",
        f"  model                {_size(plan.model_bytes)}",
        f"  one block            {_size(plan.block_bytes)}, once more for the expert in hand",
        f"  statistics           {_size(plan.statistics_bytes)} in one block",
        f"  features             {_size(plan.activation_bytes)} of all samples, at one block",
    ]
    return "\n".join(lines)


def _kinds(model: nn.Module, found: Mapping[str, BlockModules]) -> tuple[ModuleKind, ...]:
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for block, modules in found.items():
        for site in modules.sites:
            weight = model.get_parameter(site.weight_name)
            counts[_inside(site.name, block), tuple(site.oriented(weight).shape)] += 1
    return tuple(ModuleKind(name, shape, count) for (name, shape), count in counts.items())


def _statistics(model: nn.Module, modules: BlockModules) -> int:
    """Gram and cross moment of the task in hand, the folded gram, and each module's right side."""
    numbers = 0
    for site in modules.sites:
        shape = site.oriented(model.get_parameter(site.weight_name)).shape
        numbers += sum(shape) if len(shape) == 1 else 3 * shape[1] ** 2 + shape[0] * shape[1]
    return numbers * _STATISTICS.itemsize


def _inside(name: str, block: str) -> str:
    return name.removeprefix(f"{block}.")


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def _size(count: int) -> str:
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= step:
            return f"{count / step:.2f} {unit}"
    return f"{count / 1024:.1f} KiB"
