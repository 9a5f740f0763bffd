"""Sizes and FLOPs of one batch in each block, from a model without weights."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from fusion_bench_featcal.engine.modules import BlockModules, find_all_modules
from fusion_bench_featcal.engine.run import hands_on, leading_to, needed_by
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.reads.ledger import stage_place
from fusion_bench_featcal.reads.plan import Visit
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Group:
    """Linear modules that share an input, and so a Gram matrix.

    Attributes:
        width: Features of the input.
        outputs: Features of each module's output.
        rows: Rows of the input in one batch.
        names: Names inside the block.
    """

    width: int
    outputs: tuple[int, ...]
    rows: int
    names: tuple[str, ...]

    @property
    def is_narrow(self) -> bool:
        """Whether products with the expert's weights are summed in place of a cross moment."""
        return 2 * sum(self.outputs) <= self.width


@dataclass(frozen=True)
class Pass:
    """One batch's pass; sizes in bytes.

    Attributes:
        flops: Floating point operations.
        peak: Most that is alive at once.
        carried: What one side of the batch keeps afterwards.
    """

    flops: int
    peak: int
    carried: int


@dataclass(frozen=True)
class Block(Pass):
    """One batch's pass through a block.

    Attributes:
        name: The block.
        groups: Its calibrated linear modules.
        recorded: Bytes of all calibrated modules' inputs.
        hidden: Bytes of its output.
        parameters: Bytes of its parameters.
        calibrated: Number of calibrated values.
    """

    name: str
    groups: tuple[Group, ...]
    recorded: int
    hidden: int
    parameters: int
    calibrated: int


@dataclass(frozen=True)
class Work:
    """A calibration's work on one batch of one task.

    Attributes:
        family: The model's family.
        stages: The pass to each stage's first block, and its blocks.
        batch: Samples of the batch.
        inputs: Bytes of its inputs.
        tensors: Bytes of the model's tensors by name, tied ones once.
        first_names: Name of every tensor -> the first name of the same tensor.
        visits: Tensors that are read of an expert, place by place.
        dtype: The model's dtype.
        whole_model: Whether blocks run by running the whole model.
    """

    family: str
    stages: tuple[tuple[Pass, tuple[Block, ...]], ...]
    batch: int
    inputs: int
    tensors: Mapping[str, int]
    first_names: Mapping[str, str]
    visits: tuple[Visit, ...]
    dtype: torch.dtype
    whole_model: bool

    @property
    def blocks(self) -> list[Block]:
        """All blocks in forward order."""
        return [block for _, blocks in self.stages for block in blocks]

    @property
    def width(self) -> int:
        """The most frequent width of calibrated modules' inputs."""
        widths = Counter(group.width for block in self.blocks for group in block.groups)
        return widths.most_common(1)[0][0] if widths else 64


def count_work(model: nn.Module, inputs: Any, settings: FeatCalSettings) -> Work:
    """Run one batch through a model without weights.

    Args:
        model: Structure of the merged model, on the meta device.
        inputs: One batch of inputs on the meta device, without masks.
        settings: `family`, `modules`, `calibrate_norm`, `calibrate_bias`, `mix_alpha` and
            `log_drift` are used.

    Returns:
        The counts.

    Raises:
        CalibrationError: If the model cannot be calibrated.
        ValueError: If no family fits it.
    """
    family = resolve_family(settings.family, model)
    model = view_of(family).shown(model)
    stages = family.stages(model)
    modules = find_all_modules(model, stages, settings)
    goes_on = hands_on(family)
    call, counted, visits = None, [], []
    for index, stage in enumerate(stages):
        first: Any = partial(family.begin, model, inputs, stage[0])
        if goes_on and index:
            first = partial(first, family.ending(model, call))  # type: ignore[attr-defined]
        with metered() as meter:
            call = first()
        stem, blocks, known = Pass(meter.flops, meter.peak, size_of(call)), [], {}
        uses_experts = settings.mix_alpha > 0 or settings.log_drift
        leading = leading_to(model, family, stages, index, after_stages=goes_on)
        visits.append(Visit(stage_place(index), leading if uses_experts else ()))
        for place, name in enumerate(stage):
            read = needed_by(model, family, name)
            visits.append(
                Visit(name, read if uses_experts else _calibrated(modules[name], settings))
            )
            kind = _kind(model, name, modules[name])
            if kind not in known:
                known[kind], call = _count_block(model, family, name, call, modules[name])
            blocks.append(replace(known[kind], name=name))
            if not place or family.whole_model:  # a stage's first block may do more
                known.clear()
        counted.append((stem, tuple(blocks)))
    names, sizes = _tensor_sizes(model)
    first_sample = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return Work(
        family=family.name,
        stages=tuple(counted),
        batch=len(first_sample),
        inputs=size_of(inputs),
        tensors=sizes,
        first_names=names,
        visits=tuple(visits),
        dtype=next(model.parameters()).dtype,
        whole_model=family.whole_model,
    )


def _calibrated(modules: BlockModules, settings: FeatCalSettings) -> list[str]:
    return [
        name
        for site in modules.sites
        for name in site.names
        if site.kind == "norm" or name == site.weight_name or settings.calibrate_bias
    ]


def _kind(model: nn.Module, block: str, modules: BlockModules) -> Any:
    """Key of blocks that do the same: shapes of the parameters, and the calibrated modules."""
    shapes = tuple((n, tuple(p.shape)) for n, p in model.get_submodule(block).named_parameters())
    return shapes, tuple(site.name.removeprefix(block) for site in modules.sites)


def _count_block(
    model: nn.Module, family: Any, name: str, call: Any, modules: BlockModules
) -> tuple[Block, Any]:
    """Count a block's pass, and return what the next block receives."""
    inputs: dict[str, list[Tensor]] = {site.name: [] for site in modules.sites}

    def note(module: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inputs[module].append(args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as hooks:
        for site in modules.sites:
            hook = partial(note, site.name)
            module = model.get_submodule(site.name)
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        with metered() as meter:
            hidden, following = family.step(model, name, call)
    groups: dict[Any, list[Any]] = {}
    for site in modules.sites:
        if site.kind == "linear" and inputs[site.name]:
            key = tuple((id(value), value._version) for value in inputs[site.name])
            groups.setdefault(key, []).append(site)
    shapes = {
        s.name: tuple(s.oriented(model.get_parameter(s.weight_name)).shape) for s in modules.sites
    }
    parameters = list(model.get_submodule(name).parameters())
    block = Block(
        flops=meter.flops,
        peak=meter.peak,
        carried=size_of(following),
        name=name,
        groups=tuple(
            Group(
                width=shapes[sites[0].name][1],
                outputs=tuple(shapes[site.name][0] for site in sites),
                rows=sum(value.shape[:-1].numel() for value in inputs[sites[0].name]),
                names=tuple(site.name.removeprefix(f"{name}.") for site in sites),
            )
            for sites in groups.values()
        ),
        recorded=size_of(inputs),
        hidden=size_of(hidden),
        parameters=sum(p.numel() * p.element_size() for p in parameters),
        calibrated=sum(model.get_parameter(n).numel() for s in modules.sites for n in s.names),
    )
    return block, following


def _tensor_sizes(model: nn.Module) -> tuple[dict[str, str], dict[str, int]]:
    """First name of every tensor of the state dict, and bytes by first name."""
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    names = {name: first[id(tensor)] for name, tensor in tensors.items()}
    return names, {n: tensors[n].numel() * tensors[n].element_size() for n in set(names.values())}


def size_of(tree: Any) -> int:
    """Bytes of all distinct storages in a nested value, dataclasses included."""
    sizes, waiting = {}, [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            sizes[_storage(value)] = value.untyped_storage().nbytes()
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "__dataclass_fields__"):
            waiting += vars(value).values()
    return sum(sizes.values())


class Meter(TorchDispatchMode):
    """Counts FLOPs, and the largest number of bytes that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        operator = func._overloadpacket
        if operator in flop_registry:
            self.flops += flop_registry[operator](*args, **kwargs, out_val=result)
        given = set(map(_storage, _tensors((args, kwargs))))
        new = [tensor for tensor in _tensors(result) if _storage(tensor) not in given]
        if new:
            self._alive = {k: entry for k, entry in self._alive.items() if not entry[0].expired()}
            for tensor in new:
                storage = tensor.untyped_storage()
                self._alive[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


class _FusedAttention(TorchFunctionMode):
    """Attention that keeps no scores; on the meta device torch would form them."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *kwargs.values())[:3]
        self._meter.flops += (
            2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        )
        return query.new_empty(*query.shape[:-1], value.shape[-1])


@contextmanager
def metered() -> Iterator[Meter]:
    """Context on the meta device, without autocast, which models cannot switch off there."""
    meter, autocast = Meter(), torch.autocast
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment,misc]
    try:
        with torch.no_grad(), torch.device("meta"), _FusedAttention(meter), meter:
            yield meter
    finally:
        torch.autocast = autocast  # type: ignore[misc]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def example_inputs(model: nn.Module, samples: int, length: int, target_length: int) -> Any:
    """A batch of a model's inputs on the meta device.

    Args:
        model: The model.
        samples: Samples in the batch.
        length: Tokens of a text.
        target_length: Tokens of an encoder-decoder's target.

    Raises:
        ValueError: If the model has no config.
    """
    config: Any = getattr(model, "config", None)
    if config is None:
        raise ValueError(
            f"{type(model).__name__} has no config that tells its inputs; featcal plan knows the "
            "models of transformers"
        )
    if hasattr(config, "image_size"):
        side, channels = config.image_size, getattr(config, "num_channels", 3)
        return {"pixel_values": torch.empty(samples, channels, side, side, device="meta")}
    ids = torch.empty(samples, length, dtype=torch.long, device="meta")
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": ids, "labels": ids.new_empty(samples, target_length)}
    return {"input_ids": ids}


def without_masks(inputs: Any) -> Any:
    """A batch on the meta device without masks, whose values models look at."""
    if isinstance(inputs, Mapping):
        kept = {key: value for key, value in inputs.items() if not key.endswith("attention_mask")}
        return {key: _empty(value) for key, value in kept.items()}
    return tuple(map(_empty, inputs)) if isinstance(inputs, tuple | list) else _empty(inputs)


def _empty(value: Any) -> Any:
    return value.to("meta") if isinstance(value, Tensor) else value
