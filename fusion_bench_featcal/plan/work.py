"""What a calibration will do, block by block, counted on a model without weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.engine.modules import BlockModules, find_all_modules
from fusion_bench_featcal.engine.precision import row_dtype
from fusion_bench_featcal.engine.run import hands_on, leading_to, needed_by
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.plan.counting import Counts, counted, size_of
from fusion_bench_featcal.plan.passes import Seen, recorded
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Group:
    """Linear modules that share an input.

    Attributes:
        width: Features of the input.
        outputs: Features of each module's output.
        rows: Rows in one batch.
        names: Names of the modules inside the block.
        outputs_noted: Whether an expert's outputs of these modules are there to be summed: its pass
            runs to the block's end, in the sums' dtype.
    """

    width: int
    outputs: tuple[int, ...]
    rows: int
    names: tuple[str, ...] = ()
    outputs_noted: bool = False


@dataclass(frozen=True)
class BlockWork:
    """One block.

    Attributes:
        name: Its name.
        counts: One pass of one batch.
        until_last: A pass that ends with the last module's input, where the family allows it.
        groups: Its calibrated linear modules.
        norms: Width and rows of its calibrated norms.
        parameters: Bytes of its parameters.
        read: Bytes that a visit reads from an expert.
        anchored: Bytes of parameters that have an anchor.
        hidden: Bytes of its output, for one batch.
        calls: Bytes that one batch carries to the next block, on one side.
    """

    name: str
    counts: Counts
    until_last: Counts
    groups: tuple[Group, ...]
    norms: tuple[tuple[int, int], ...]
    parameters: int
    read: int
    anchored: int
    hidden: int
    calls: int


@dataclass(frozen=True)
class StageWork:
    """One stage.

    Attributes:
        stem: One batch, up to the first block.
        read: Bytes that are read from an expert for it.
        calls: Bytes that one batch carries to the first block, on one side.
        blocks: Its blocks.
    """

    stem: Counts
    read: int
    calls: int
    blocks: tuple[BlockWork, ...]


@dataclass(frozen=True)
class Work:
    """What a calibration will do to one batch of one task, and what there is once.

    Attributes:
        stages: The stages.
        batch: Samples in a batch.
        inputs: Bytes of a batch's inputs.
        model: Bytes of the model.
        itemsize: Bytes of a number in the model.
        replays: Whether both sides carry one and the same, the model's inputs.
        hands_on: Whether a stage begins from what the one before it ended with.
    """

    stages: tuple[StageWork, ...]
    batch: int
    inputs: int
    model: int
    itemsize: int = 4
    replays: bool = False
    hands_on: bool = False

    def is_closing(self, stage: StageWork) -> bool:
        """Whether nothing needs what the expert's last block of a stage gives."""
        return stage is self.stages[-1] or not self.hands_on

    def entry(self, settings: FeatCalSettings, tasks: int) -> int:
        """Bytes of a number in the sums: float32 at least."""
        return max(row_dtype(settings, tasks, torch.device("cpu")).itemsize, self.itemsize)

    @property
    def blocks(self) -> list[BlockWork]:
        """All blocks."""
        return [block for stage in self.stages for block in stage.blocks]


def count_work(
    model: nn.Module,
    inputs: Any,
    settings: FeatCalSettings,
    *,
    stored: Mapping[str, int] | None = None,
) -> Work:
    """Count what a calibration does to one batch.

    Args:
        model: The merged model's structure, on the meta device.
        inputs: One batch of its inputs, on the meta device, without masks.
        settings: `family`, `modules`, `calibrate_norm` and `anchor_rho` are used.
        stored: Bytes of each tensor in an expert's files; None: as in the model.

    Returns:
        The counts.

    Raises:
        CalibrationError: If the model cannot be calibrated.
        ValueError: If there is no family for it.
    """
    family = resolve_family(settings.family, model)
    shown = view_of(family).shown(model)
    stages = family.stages(shown)
    modules = find_all_modules(shown, stages, settings)
    sizes = {n: t.numel() * t.element_size() for n, t in shown.state_dict().items()}
    read = sizes | {name: size for name, size in (stored or {}).items() if name in sizes}
    found: list[StageWork] = []
    goes_on, call = hands_on(family), None
    with torch.device("meta"):
        for index, stage in enumerate(stages):
            earlier = call if goes_on else None
            call, stem = counted(lambda s=stage, e=earlier: _begin(family, shown, inputs, s[0], e))
            names = leading_to(shown, family, stages, index, after_stages=goes_on)
            leading = _size(read, names, shown)
            calls = size_of(call)
            blocks: list[BlockWork] = []
            known: dict[Any, BlockWork] = {}
            for place, block in enumerate(stage):
                last = block == stage[-1] and (stage is stages[-1] or not goes_on)
                needed = _size(read, _needed(shown, family, block, modules[block], settings), shown)
                kind = last, _kind_of(shown, block, modules[block])
                if kind in known:
                    blocks.append(replace(known[kind], name=block, read=needed))
                    continue
                work, call = _count_block(
                    shown, family, block, call, modules[block], needed, last=last
                )
                blocks.append(work)
                if place and not family.whole_model:  # a stage's first block may do more
                    known[kind] = work
            found.append(StageWork(stem, leading, calls, tuple(blocks)))
    first_sample = next(v for v in _values(inputs) if isinstance(v, Tensor))
    total = sum(p.numel() * p.element_size() for p in shown.parameters())
    itemsize = next(shown.parameters()).element_size()
    return Work(
        tuple(found),
        len(first_sample),
        size_of(inputs),
        total,
        itemsize,
        family.whole_model,
        goes_on,
    )


def _begin(family: Any, model: nn.Module, inputs: Any, first: str, earlier: Any) -> Any:
    """What a stage's first block receives; `earlier`: what a block behind the last stage's does."""
    if earlier is None:
        return family.begin(model, inputs, first)
    return family.begin(model, inputs, first, family.ending(model, earlier))


def _needed(
    model: nn.Module, family: Any, block: str, modules: BlockModules, settings: FeatCalSettings
) -> list[str]:
    """What a visit reads: the whole block where the expert runs, else what gets new values."""
    if settings.mix_alpha > 0 or settings.log_drift:
        return needed_by(model, family, block)
    return [
        name
        for site in modules.sites
        for name in site.names
        if site.kind == "norm" or name == site.weight_name or settings.calibrate_bias
    ]


def _kind_of(model: nn.Module, block: str, modules: BlockModules) -> Any:
    """What makes two blocks do the same: their parameters' shapes, and what is calibrated."""
    shapes = tuple((n, tuple(p.shape)) for n, p in model.get_submodule(block).named_parameters())
    return shapes, tuple(site.name.removeprefix(block) for site in modules.sites)


def _count_block(
    model: nn.Module,
    family: Any,
    block: str,
    call: Any,
    modules: BlockModules,
    needed: int,
    *,
    last: bool,
) -> tuple[BlockWork, Any]:
    names = [site.name for site in modules.sites]
    seen = Seen()
    (hidden, following), counts = recorded(
        model, names, seen, lambda: family.step(model, block, call)
    )
    until_last = counts
    if getattr(family, "same_calls", False):
        short = Seen(stop_after=len(seen.alive))
        _, until_last = recorded(model, names, short, lambda: family.step(model, block, call))
    shapes = {
        s.name: tuple(s.oriented(model.get_parameter(s.weight_name)).shape) for s in modules.sites
    }
    linear = [s.name for s in modules.sites if s.kind == "linear" and s.name in seen.keys]
    noted = not last and hidden.element_size() >= 4
    own = [(s, s.weight_name) for s in modules.sites]
    own += [(s, s.bias_name) for s in modules.sites if s.has_bias]
    parameters = model.get_submodule(block).parameters()
    work = BlockWork(
        name=block,
        counts=counts,
        until_last=until_last,
        groups=_groups(block, linear, shapes, seen, noted),
        norms=tuple(
            (shapes[s.name][0], seen.rows[s.name]) for s in modules.sites if s.kind == "norm"
        ),
        parameters=sum(p.numel() * p.element_size() for p in parameters),
        read=needed,
        anchored=sum(model.get_parameter(n).numel() * 4 for _, n in own),
        hidden=size_of(hidden),
        calls=size_of(following),
    )
    return work, following


def _groups(
    block: str,
    linear: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    seen: Seen,
    outputs_noted: bool,
) -> tuple[Group, ...]:
    """The linear modules by the input that they share."""
    together: dict[Any, list[str]] = {}
    for name in linear:
        together.setdefault(seen.keys[name], []).append(name)
    return tuple(
        Group(
            width=shapes[names[0]][1],
            outputs=tuple(shapes[name][0] for name in names),
            rows=seen.rows[names[0]],
            names=tuple(name.removeprefix(f"{block}.") for name in names),
            outputs_noted=outputs_noted,
        )
        for names in together.values()
    )


def _size(sizes: Mapping[str, int], names: Sequence[str], model: nn.Module) -> int:
    """Bytes of the named tensors, tied ones once."""
    tensors = model.state_dict(keep_vars=True)
    distinct = {id(tensors[name]): name for name in names}
    return sum(sizes[name] for name in distinct.values())


def _values(inputs: Any) -> list[Any]:
    if isinstance(inputs, Mapping):
        return list(inputs.values())
    return list(inputs) if isinstance(inputs, tuple | list) else [inputs]
