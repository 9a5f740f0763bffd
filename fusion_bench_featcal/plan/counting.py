"""Sizes and FLOPs of one batch in each block, from a model without weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from fusion_bench_featcal.core.moments import outputs_are_few
from fusion_bench_featcal.engine.modules import BlockModules, find_all_modules
from fusion_bench_featcal.engine.problem import tensors_before_stage, tensors_of_block
from fusion_bench_featcal.experts.reading import stage_place
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.settings import FeatCalSettings


@dataclass(frozen=True)
class Group:
    """Linear modules that share an input, and so a Gram matrix."""

    width: int  # features of the input
    outputs: tuple[int, ...]  # features of each module's output
    rows: int  # tokens in one batch
    names: tuple[str, ...]  # inside the block

    @property
    def is_narrow(self) -> bool:
        """True where products with the expert's weights are summed, and no cross moment."""
        return outputs_are_few(sum(self.outputs), self.width)


@dataclass(frozen=True)
class Place:
    """One batch's pass through a block, or up to a stage's first block; sizes in bytes."""

    name: str
    needed: Sequence[str]  # the expert's tensors that are read for it
    flops: int
    peak: int  # most that is alive at once
    carried: int  # size of what one side of the batch keeps afterwards
    hidden: int = 0  # size of the block's output
    recorded: int = 0  # size of all calibrated modules' inputs
    parameters: int = 0  # size of the block's parameters
    calibrated: int = 0  # number of calibrated values
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Work:
    """A calibration's work on one batch of one task."""

    family: str
    stages: tuple[tuple[Place, ...], ...]  # each: the way to its first block, then its blocks
    batch: int  # samples
    inputs: int  # bytes
    names: Mapping[str, str]  # of every tensor of the model -> the first name of the same tensor
    tensors: Mapping[str, int]  # bytes by first name
    dtype: torch.dtype
    whole_model: bool  # whether blocks run by running the whole model

    @property
    def places(self) -> list[Place]:
        """All places in order."""
        return list(chain.from_iterable(self.stages))

    @property
    def blocks(self) -> list[Place]:
        """All blocks in forward order."""
        return [block for _, *blocks in self.stages for block in blocks]

    @property
    def groups(self) -> list[Group]:
        """The calibrated linear modules of all blocks."""
        return [group for block in self.blocks for group in block.groups]


def count_work(model: nn.Module, inputs: Any, settings: FeatCalSettings) -> Work:
    """Run one batch through a model without weights.

    Args:
        model: Structure of the merged model, on the meta device.
        inputs: One batch of inputs on the meta device, without masks.
        settings: Settings of the calibration.

    Raises:
        CalibrationError: If the model cannot be calibrated.
        ValueError: If no family fits it.
    """
    family: Any = resolve_family(settings.family, model)
    model = family.view.shown(model)
    blocks = family.stages(model)
    modules = find_all_modules(model, blocks, settings)
    runs = settings.runs_experts
    stages: list[tuple[Place, ...]] = []
    call: Any = None
    for index, stage in enumerate(blocks):
        follows = family.hands_on and index > 0
        with metered() as meter:
            end = (family.ending(model, call),) if follows else ()
            call = family.begin(model, inputs, stage[0], *end)
        needed = tensors_before_stage(model, family, blocks, index) if runs else ()
        places = [Place(stage_place(index), needed, meter.flops, meter.peak, size_of(call))]
        known: dict[Any, Place] = {}
        for name in stage:
            kind = _kind(model, name, modules[name])
            if kind not in known:
                known[kind], call = _count_block(model, family, name, call, modules[name])
            needed = modules[name].calibrated(biased=settings.calibrate_bias)
            needed = tensors_of_block(model, family, name) if runs else needed
            places.append(replace(known[kind], name=name, needed=needed))
            if len(places) == 2 or family.whole_model:  # a stage's first block may do more
                known.clear()
        stages.append(tuple(places))
    tensors = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return Work(
        family=family.name,
        stages=tuple(stages),
        batch=len(_tensors(inputs)[0]),
        inputs=size_of(inputs),
        names={name: first[id(tensor)] for name, tensor in tensors.items()},
        tensors={name: tensors[name].nbytes for name in first.values()},
        dtype=next(model.parameters()).dtype,
        whole_model=family.whole_model,
    )


def _kind(model: nn.Module, block: str, modules: BlockModules) -> Any:
    """Key of blocks that do the same."""
    shapes = tuple((n, tuple(p.shape)) for n, p in model.get_submodule(block).named_parameters())
    return shapes, tuple(site.name.removeprefix(block) for site in modules.sites)


def _count_block(
    model: nn.Module, family: Any, name: str, call: Any, modules: BlockModules
) -> tuple[Place, Any]:
    """Count a block's pass; also return what the next block receives."""
    inputs: dict[str, list[Tensor]] = {site.name: [] for site in modules.sites}

    def note(module: str, _: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        inputs[module].append(args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as hooks:
        for module in inputs:
            add = model.get_submodule(module).register_forward_pre_hook
            hooks.callback(add(partial(note, module), with_kwargs=True).remove)
        with metered() as meter:
            hidden, following = family.step(model, name, call)
    together: dict[Any, list[Any]] = {}
    for site in modules.sites:
        if site.kind == "linear" and inputs[site.name]:
            key = tuple((id(value), value._version) for value in inputs[site.name])
            together.setdefault(key, []).append(site)
    groups = []
    for sites in together.values():
        shapes = [s.oriented(model.get_parameter(s.weight_name)).shape for s in sites]
        rows = sum(value.shape[:-1].numel() for value in inputs[sites[0].name])
        names = tuple(site.name.removeprefix(f"{name}.") for site in sites)
        groups.append(Group(shapes[0][1], tuple(shape[0] for shape in shapes), rows, names))
    place = Place(
        name=name,
        needed=(),
        flops=meter.flops,
        peak=meter.peak,
        carried=size_of(following),
        hidden=size_of(hidden),
        recorded=size_of(inputs),
        parameters=sum(p.nbytes for p in model.get_submodule(name).parameters()),
        calibrated=sum(model.get_parameter(n).numel() for s in modules.sites for n in s.names),
        groups=tuple(groups),
    )
    return place, following


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

    flops = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *kwargs.values())[:3]
        width = query.shape[-1] + value.shape[-1]
        self.flops += 2 * query[..., 0].numel() * key.shape[-2] * width
        return query.new_empty(*query.shape[:-1], value.shape[-1])


@contextmanager
def metered() -> Iterator[Meter]:
    """Context on the meta device, without autocast, which models cannot switch off there."""
    meter, attention = Meter(), _FusedAttention()
    with (
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
        torch.no_grad(),
        torch.device("meta"),
        attention,
        meter,
    ):
        yield meter
    meter.flops += attention.flops


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def example_inputs(model: nn.Module, samples: int, length: int, target_length: int) -> Any:
    """A batch of a model's inputs on the meta device; `length` counts the tokens of a text.

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
        inputs = {k: value for k, value in inputs.items() if not k.endswith("attention_mask")}
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), inputs)
