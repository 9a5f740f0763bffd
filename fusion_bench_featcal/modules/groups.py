"""Inputs of a block's modules, recorded while it runs, and groups of modules that share one."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm

from fusion_bench_featcal.core.linear import Linear, at_least_float32
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.families.base import ForwardStopped, stoppable
from fusion_bench_featcal.modules.models import tensors_under
from fusion_bench_featcal.modules.sites import Site, exclusion


@dataclass
class Recorded:
    """Arguments of modules in one pass.

    Attributes:
        arguments: Those of each module, in the order of their calls.
        result: Return value of the pass, or None if it ended early.
    """

    arguments: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    result: Any = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """Return the input of each module: its first argument."""
        return {name: arguments[0] for name, arguments in self.arguments.items()}


def record(
    model: nn.Module, names: Collection[str], run: Callable[[], Any], *, to_end: bool = True
) -> Recorded:
    """Run a block and record the inputs of modules.

    Args:
        model: The model.
        names: Names of the modules.
        run: Runs the block.
        to_end: Whether the pass goes on after all modules were called.

    Raises:
        CalibrationError: If the block calls a module twice, or overwrites its input.
    """
    recorded, versions, twice = Recorded(), list[tuple[str, Tensor, int]](), dict[str, None]()

    def note(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in recorded.arguments:
            twice[name] = None
            return
        recorded.arguments[name] = (*args, *kwargs.values())
        x = recorded.arguments[name][0]
        versions.append((name, x, x._version))
        if len(versions) == len(names) and not to_end:
            raise ForwardStopped

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name in names
    ]
    with stoppable(*hooks):
        recorded.result = run()
    if twice:
        ends = [name.rpartition(".")[2] for name in twice]
        raise CalibrationError(
            f"modules {', '.join(twice)} run twice in their block, so their inputs cannot be "
            f"summed. Exclude them: {exclusion(ends)}"
        )
    for name, x, version in versions:
        if x._version != version:
            raise CalibrationError(
                f"module {name}: the block later overwrites its input (an in-place operation), so "
                "the input cannot be summed. Rewrite the block's forward without this operation, "
                f"or exclude the module: {exclusion([name])}"
            )
    return recorded


@dataclass(frozen=True)
class Group:
    """Linear modules with one input, one norm, or the statistics of one BatchNorm.

    Attributes:
        sites: The modules.
        biased: Whether they have biases.
        in_features: Number of inputs.
        out_features: Number of outputs of each module.
        dtype: Dtype in which their parameters are stored.
        shared_input: Name of the first module in the block that received the same tensor.
        slot: Number of the routed expert, if it is a matrix of one.
    """

    sites: tuple[Site, ...]
    biased: bool
    in_features: int
    out_features: tuple[int, ...]
    dtype: torch.dtype
    shared_input: str
    slot: int | None = None

    @property
    def name(self) -> str:
        """Return the name of the first module, which identifies the group in messages."""
        return self.sites[0].name

    @property
    def label(self) -> str:
        """Return the name with the number of the routed expert, for messages."""
        return self.name if self.slot is None else f"{self.name}[{self.slot}]"

    @property
    def kind(self) -> str:
        """Return `linear`, `norm` or `statistics`."""
        return self.sites[0].kind

    def place(self, block: str, task: str) -> AbstractContextManager[None]:
        """Return a context that adds the first module to errors, and how to exclude it."""
        remedy = f"Exclude it: {exclusion([self.name], block)}"
        return error_context(task=task, block=block, module=self.label, remedy=remedy)

    @property
    def convolves(self) -> bool:
        """Return whether the modules are convolutions."""
        return self.sites[0].patches is not None

    @property
    def has_few_outputs(self) -> bool:
        """Return whether sums of the expert's outputs are cheaper than sums of its inputs."""
        return self.kind == "linear" and 2 * sum(self.out_features) <= self.in_features

    @property
    def parameters(self) -> list[str]:
        """Return the names of all parameters of the modules."""
        return [name for site in self.sites for name in site.names]

    def stack_weights(self, get: Callable[[str], Tensor], dtype: torch.dtype) -> Linear:
        """Return the parameters as stacked matrices.

        Args:
            get: Returns a parameter by name.
            dtype: Least precise dtype of the result.
        """
        weights, biases = [], []
        for site in self.sites:
            weights.append(weight := site.oriented(get(site.weight_name)))
            has_bias = site.has_bias
            biases.append(get(site.bias_name) if has_bias else weight.new_zeros(len(weight)))
        dtype = torch.promote_types(weights[0].dtype, dtype)
        # Stacked and converted at once: a wide copy of each weight would be large.
        weight = torch.cat(weights, out=weights[0].new_empty(0, dtype=dtype))
        return Linear(weight, torch.cat(biases).to(dtype))

    def unstack_weights(self, solved: Linear, *, biases: bool) -> dict[str, Tensor]:
        """Return the parameters by name, in their storage layout and dtype.

        Args:
            solved: New parameters, stacked.
            biases: Whether biases of linear modules change, too.

        Raises:
            CalibrationError: If they have other shapes than the modules'.
        """
        if self.kind == "statistics":
            names = f"{self.name}.running_mean", f"{self.name}.running_var"
            return dict(zip(names, (solved.bias, solved.weight), strict=True))
        new, shape = dict[str, Tensor](), (sum(self.out_features), self.in_features)
        shape = shape[:1] if self.kind == "norm" else shape
        if (solved.weight.shape, solved.bias.shape) != (shape, shape[:1]):
            raise CalibrationError(
                f"module {self.name}: the rule's solve returned a weight "
                f"{tuple(solved.weight.shape)} and a bias {tuple(solved.bias.shape)}, not {shape} "
                f"and {shape[:1]}"
            )
        tensors = solved.weight.split(self.out_features), solved.bias.split(self.out_features)
        for site, weight, bias in zip(self.sites, *tensors, strict=True):
            # Copies, as each parameter has memory of its own.
            new[site.weight_name] = site.stored(weight).clone(memory_format=torch.contiguous_format)
            if site.has_bias and (biases or self.kind == "norm"):
                new[site.bias_name] = bias.clone()
        return new


def find_groups(
    model: nn.Module,
    block: str,
    sites: Sequence[Site],
    recorded: Recorded,
    rows_of: Callable[[str], Any],
) -> list[Group]:
    """Group a block's modules by their inputs, in the order of their calls.

    Args:
        model: The model.
        block: The block's name, for messages.
        sites: The modules.
        recorded: One pass of a batch through the block, in which these and other modules were
            recorded.
        rows_of: Returns an equal value for modules that count the same rows.

    Raises:
        CalibrationError: If a module did not run.
    """
    by_name = {site.name: site for site in sites}
    if unused := [name for name in by_name if name not in recorded.inputs]:
        ends = ", ".join(name.removeprefix(f"{block}.") for name in unused)
        raise CalibrationError(
            f"block {block} does not run its {ends}. Exclude them: {exclusion(unused, block)}"
        )
    members, inputs = dict[Any, list[Site]](), dict[Any, str]()
    for name, x in recorded.inputs.items():
        if (site := by_name.get(name)) is None:
            continue
        alone = name if site.kind != "linear" else None
        first = inputs.setdefault((id(x), alone), name)
        key = first, rows_of(name), site.has_bias, site.patches
        members.setdefault(key, []).append(site)
    get = tensors_under(model, block).__getitem__
    return [group_of(tuple(call_sites), get, key[0]) for key, call_sites in members.items()]


def group_of(
    sites: tuple[Site, ...],
    get: Callable[[str], Tensor],
    shared_input: str,
    slot: int | None = None,
) -> Group:
    """Return modules with one input as a group.

    Args:
        sites: The modules, or the matrix of one routed expert.
        get: Returns a parameter or buffer by name, or the routed expert's part of it.
        shared_input: Name of the first module in the block that received the same tensor.
        slot: Number of the routed expert.
    """
    if sites[0].kind == "statistics":
        weights = [get(f"{sites[0].name}.running_mean")]
    else:
        weights = [site.oriented(get(site.weight_name)) for site in sites]
    first, sizes = weights[0], tuple(map(len, weights))
    biased, width = sites[0].has_bias, first.shape[-1]
    return Group(sites, biased, width, sizes, first.dtype, shared_input, slot)


def normalised(module: Any, site: Site, x: Tensor) -> Tensor:
    """Return a norm's normalised input with channels last, in float32 or better (Eq. 56)."""
    x = at_least_float32(x)
    if isinstance(module, nn.GroupNorm):
        return group_norm(x, module.num_groups, eps=module.eps).movedim(1, -1)
    x = x.movedim(1, -1) if site.channels_first else x
    return layer_norm(x, x.shape[-1:], eps=module.eps)
