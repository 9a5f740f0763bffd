"""Modules that can be calibrated, and the storage layout of their parameters."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from torch.nn.utils.parametrize import is_parametrized

from fusion_bench_featcal.core.patches import Patches
from fusion_bench_featcal.errors.words import option


@dataclass(frozen=True)
class Site:
    """One calibrated module of a block.

    Attributes:
        name: Its full name in the model.
        kind: `linear` (convolutions too: linear maps of patches), `norm` (LayerNorm or GroupNorm
            with gain and shift) or `statistics` (of a BatchNorm).
        has_bias: Whether the module has a bias (linear) or shift (norm).
        transposed: Whether its weight is stored `[in, out]` (GPT-2's Conv1D).
        patches: Geometry of a convolution, or None for any other module.
        channels_first: Whether a norm receives `[batch, d, ...]`, not `[..., d]`.
        is_stacked: Whether the site is one parameter `[slots, ...]` that stacks the matrices of
            all routed experts. The other attributes then describe one of these matrices.
    """

    name: str
    kind: str
    has_bias: bool = True
    transposed: bool = False
    patches: Patches | None = None
    channels_first: bool = False
    is_stacked: bool = False

    @property
    def weight_name(self) -> str:
        """Name of the weight (linear) or gain (norm) in the model's state dict."""
        return self.name if self.is_stacked else f"{self.name}.weight"

    @property
    def bias_name(self) -> str:
        """Name of the bias (linear) or shift (norm)."""
        return f"{self.name}_bias" if self.is_stacked else f"{self.name}.bias"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its calibrated parameters. The experts have parameters of the same names."""
        if self.kind == "statistics":
            return ()
        return (self.weight_name, self.bias_name) if self.has_bias else (self.weight_name,)

    def oriented(self, weight: Tensor) -> Tensor:
        """Return a stored weight as `[out, in]`, the gain of a norm as it is."""
        if self.patches is not None:
            return weight.flatten(1)
        return weight.T if self.transposed else weight

    def stored(self, weight: Tensor) -> Tensor:
        """Return a weight `[out, in]` in its storage layout."""
        if self.patches is not None:
            return weight.reshape(len(weight), -1, *self.patches.kernel)
        return weight.T if self.transposed else weight


def site_of(name: str, module: Any) -> Site | None:
    """Return a module as a site, or None if it cannot be calibrated."""
    from transformers.pytorch_utils import Conv1D

    if is_linear(module):
        return Site(name, "linear", module.bias is not None)
    if runs_as(module, Conv1D):
        return Site(name, "linear", transposed=True)
    if runs_as(module, nn.Conv2d) and module.groups == 1:
        return Site(name, "linear", module.bias is not None, patches=_patches(module))
    if is_layer_norm(module) and module.bias is not None and module.weight.ndim == 1:
        first = getattr(module, "data_format", None) == "channels_first"  # as ConvNeXt's
        return Site(name, "norm", channels_first=first)
    if runs_as(module, nn.GroupNorm) and module.affine:
        return Site(name, "norm", channels_first=True)
    return None


def _patches(module: Any) -> Patches:
    """Return the geometry of a convolution."""
    padding = [0] * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
    pads = [(side, side) for side in padding]
    if module.padding == "same":
        spans = zip(module.kernel_size, module.dilation, strict=True)
        pads = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in spans]
    return Patches(
        kernel=module.kernel_size,
        stride=module.stride,
        dilation=module.dilation,
        padding=tuple(pads),
        mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
    )


def is_selected(name: str, patterns: Sequence[str] | None) -> bool:
    """Return whether patterns select a module. A leading `!` excludes, None selects all."""
    included = [p for p in patterns or () if not p.startswith("!")]
    chosen = not included or any(matches(name, pattern) for pattern in included)
    excluded = (p[1:] for p in patterns or () if p.startswith("!"))
    return chosen and not any(matches(name, pattern) for pattern in excluded)


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern such as `fc1` or `*.mlp.fc1` matches a name or an end of it."""
    leaves = name.split(".")
    return any(fnmatchcase(".".join(leaves[start:]), pattern) for start in range(len(leaves)))


def is_named(name: str, patterns: Sequence[str] | None) -> bool:
    """Return whether a pattern without `!` matches a module, and none excludes it."""
    included = any(not pattern.startswith("!") for pattern in patterns or ())
    return included and is_selected(name, patterns)


def exclusion(names: Iterable[str], block: str = "") -> str:
    """Return the option that excludes modules. With a block, names are relative to it."""
    return option("modules", [f"!{name.removeprefix(f'{block}.')}" for name in names])


def runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module uses the forward of its kind, not an override."""
    is_unchanged = isinstance(module, kind) and type(module).forward is kind.forward
    return is_unchanged and not is_parametrized(module)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear map by its weight and bias and has no other state.

    A subclass with an overridden forward (Falcon's) is tried on a small example, unless it has
    attributes that `nn.Linear` lacks. These, such as a scale, could differ between modules.
    """
    if not isinstance(module, nn.Linear) or is_parametrized(module):
        return False
    usual = {*vars(nn.Linear(1, 1, device="meta")), "_is_hf_initialized"}  # a flag of transformers
    return runs_as(module, nn.Linear) or (
        set(vars(module)) <= usual and bool(_agrees(type(module), nn.Linear))
    )


def is_layer_norm(module: nn.Module) -> bool:
    """Return whether a module is a LayerNorm whose gain and shift are its weight and bias.

    A subclass with another formula does not count (Nemotron's gain is one more than its weight).
    """
    if not isinstance(module, nn.LayerNorm):
        return False
    return runs_as(module, nn.LayerNorm) or _agrees(type(module), nn.LayerNorm) is not False


@cache
def _agrees(kind: Any, base: type[nn.Module]) -> bool | None:
    """Try a small module of a class with random weights. Return None if it cannot be run."""
    generator, sizes = torch.Generator().manual_seed(0), (4, 4) if base is nn.Linear else (4,)
    try:
        with torch.device("cpu"), torch.no_grad():
            module: Any = kind(*sizes).float()
            random = partial(torch.randn, generator=generator, dtype=torch.float32)
            for parameter in module.parameters():
                parameter.copy_(random(parameter.shape))
            x, weight, bias = random(3, 4), module.weight, module.bias
            if base is nn.Linear:
                expected = linear(x, weight, bias)
            else:
                expected = layer_norm(x, x.shape[-1:], weight, bias, module.eps)
            return bool(torch.allclose(module(x), expected, rtol=1e-4, atol=1e-4))
    except Exception:  # a class that takes other arguments
        return None
