"""Modules of a block that receive the same input, in the order of their calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import group_norm, layer_norm

from fusion_bench_featcal.core.linear import Linear
from fusion_bench_featcal.families.transformers_names import CROSS_ATTENTIONS
from fusion_bench_featcal.modules.hooks import Recorded
from fusion_bench_featcal.modules.sites import Site
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class Group:
    """Linear modules with one input, or one norm or BatchNorm.

    Attributes:
        sites: The modules.
        calls: Number of calls of each in one pass through the block.
        biased: Whether they have biases.
        inputs: Number of inputs of one map.
        outputs: Number of outputs of each module, of one map if it has several.
        dtype: Dtype in which their parameters are stored.
    """

    sites: tuple[Site, ...]
    calls: int
    biased: bool
    inputs: int
    outputs: tuple[int, ...]
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """Return the name of the first module, which identifies the group in messages."""
        return self.sites[0].name

    @property
    def kind(self) -> str:
        """Return `linear`, `norm` or `batch_norm`."""
        return self.sites[0].kind

    @property
    def maps(self) -> int:
        """Return the number of linear maps with separate inputs."""
        return self.sites[0].groups

    @property
    def convolves(self) -> bool:
        """Return whether the modules are convolutions."""
        return self.sites[0].patches is not None

    @property
    def has_few_outputs(self) -> bool:
        """Return whether summing drifts after the expert's weight is cheaper than before it."""
        return self.kind == "linear" and self.maps == 1 and 2 * sum(self.outputs) <= self.inputs

    @property
    def cost(self) -> float:
        """Return the number of scalar products of its solve, up to a factor."""
        if self.kind != "linear":
            return self.inputs
        return self.maps * self.inputs**2 * (self.inputs / 3 + 2 * sum(self.outputs))

    @property
    def parameters(self) -> list[str]:
        """Return the names of all parameters of the modules."""
        return [name for site in self.sites for name in site.names]

    def linear(self, get: Callable[[str], Tensor], dtype: torch.dtype) -> Linear:
        """Return the parameters as stacked matrices.

        Args:
            get: Returns a parameter by name.
            dtype: Least precise dtype of the result.
        """
        weights, biases = [], []
        for site in self.sites:
            stored = get(site.weight_name).detach()
            weights.append(stored[None, None] if self.kind == "norm" else by_map(site, stored))
            bias = weights[-1].new_zeros(weights[-1].shape[:2])
            if site.has_bias:
                bias = get(site.bias_name).detach().reshape(site.groups, -1)
            biases.append(bias)
        dtype = torch.promote_types(weights[0].dtype, dtype)
        # Stacked and converted at once: a wide copy of each weight would be large.
        weight = torch.cat(weights, 1, out=weights[0].new_empty(0, dtype=dtype))
        return Linear(weight, torch.cat(biases, -1).to(dtype))

    def updates(self, solved: Linear, *, biases: bool) -> dict[str, Tensor]:
        """Return the parameters by name, in their storage layout and dtype.

        Args:
            solved: New parameters, stacked. For a BatchNorm, variance and mean in place of gain and
                shift.
            biases: Whether biases of linear modules change, too.
        """
        site = self.sites[0]
        if self.kind == "batch_norm":
            mean, variance = f"{site.name}.running_mean", f"{site.name}.running_var"
            return {mean: solved.bias[0], variance: solved.weight[0, 0]}
        if self.kind == "norm":
            return {site.weight_name: solved.weight[0, 0], site.bias_name: solved.bias[0]}
        new: dict[str, Tensor] = {}
        weights, shifts = solved.weight.split(self.outputs, 1), solved.bias.split(self.outputs, 1)
        for site, weight, bias in zip(self.sites, weights, shifts, strict=True):
            new[site.weight_name] = site.stored(weight.flatten(0, 1))
            if site.has_bias and biases:
                new[site.bias_name] = bias.flatten()
        return new


def by_map(site: Site, weight: Tensor) -> Tensor:
    """Return a stored weight as `[g, out / g, in]`."""
    oriented = site.oriented(weight)
    return oriented.reshape(site.groups, -1, oriented.shape[-1])


def find_groups(
    model: nn.Module,
    block: str,
    sites: Sequence[Site],
    recorded: Recorded,
    mask_of: Callable[[str], Any],
) -> list[Group]:
    """Group a block's modules by their inputs, in the order of their calls.

    Args:
        model: The model.
        block: The block's name, for messages.
        sites: The modules.
        recorded: One pass of a batch through the block, in which all modules were recorded.
        mask_of: Returns the mask of a module's rows.

    Raises:
        CalibrationError: If a module did not run, or a BatchNorm not exactly once.
    """
    by_name = {site.name: site for site in sites}
    for name, site in by_name.items():
        runs = len(recorded.inputs.get(name, ()))
        if runs == 0 or (site.kind == "batch_norm" and runs > 1):
            does = f"runs {runs} times" if runs else "ran 0 times"
            raise CalibrationError(
                f"block {block}: module {name} {does}. Exclude it: method.modules=['!{name}']"
            )
    members: dict[Any, list[Site]] = {}
    for name, inputs in recorded.inputs.items():
        site = by_name[name]
        alone = name if site.kind != "linear" or site.groups > 1 else None
        key = tuple(map(id, inputs)), id(mask_of(name)), site.has_bias, site.patches, alone
        members.setdefault(key, []).append(site)
    return [
        Group(
            tuple(same_input),
            calls=len(recorded.inputs[same_input[0].name]),
            biased=same_input[0].has_bias,
            inputs=_shape(model, same_input[0])[1],
            outputs=tuple(_shape(model, site)[0] for site in same_input),
            dtype=_dtype(model, same_input[0]),
        )
        for same_input in members.values()
    ]


def _shape(model: nn.Module, site: Site) -> tuple[int, int]:
    """Return outputs and inputs of one map."""
    if site.kind == "batch_norm":
        return 1, len(model.get_buffer(f"{site.name}.running_mean"))
    weight = model.get_parameter(site.weight_name)
    if site.kind == "norm":
        return 1, len(weight)
    _, outputs, inputs = by_map(site, weight).shape
    return outputs, inputs


def _dtype(model: nn.Module, site: Site) -> torch.dtype:
    if site.kind == "batch_norm":
        return model.get_buffer(f"{site.name}.running_mean").dtype
    return model.get_parameter(site.weight_name).dtype


def normalised(module: Any, site: Site, x: Tensor) -> Tensor:
    """Return a norm's normalised input with channels last, in float32 or better (Eq. 56)."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(module, nn.GroupNorm):
        return group_norm(x, module.num_groups, eps=module.eps).movedim(1, -1)
    x = x.movedim(1, -1) if site.channels_first else x
    return layer_norm(x, x.shape[-1:], eps=module.eps)


_SHARING = (
    {"q", "k", "v"}, {"q_proj", "k_proj", "v_proj"}, {"query", "key", "value"},
    {"gate_proj", "up_proj"}, {"wi_0", "wi_1"}, {"w1", "w3"},
)  # fmt: skip


def groups_by_name(
    model: nn.Module, sites: Sequence[Site], *, queries_apart: bool = False
) -> list[Group]:
    """Group a block's modules by their names, for plans without samples.

    Modules with unknown names count as having separate inputs.

    Args:
        model: The model, on any device.
        sites: The modules.
        queries_apart: Whether queries count other rows than keys and values.
    """
    members: dict[Any, list[Site]] = {}
    for site in sites:
        owner, _, leaf = site.name.rpartition(".")
        sharing = next((number for number, names in enumerate(_SHARING) if leaf in names), None)
        crossed = queries_apart or any(part in owner for part in CROSS_ATTENTIONS)
        queries = leaf.startswith("q") and crossed
        alone = sharing is None or site.kind == "norm" or site.groups > 1 or queries
        members.setdefault(site.name if alone else (owner, sharing, site.has_bias), []).append(site)
    return [
        Group(
            tuple(group),
            calls=1,
            biased=group[0].has_bias,
            inputs=_shape(model, group[0])[1],
            outputs=tuple(_shape(model, site)[0] for site in group),
            dtype=_dtype(model, group[0]),
        )
        for group in members.values()
    ]
