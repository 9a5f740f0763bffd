"""Modules of a block that are calibrated, and the storage layout of their parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, linear
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from fusion_bench_featcal.core.patches import Patches
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option


@dataclass(frozen=True)
class Site:
    """One calibrated module of a block.

    Attributes:
        name: Its full name in the model.
        kind: `linear` (convolutions too: linear maps of patches), `norm` (LayerNorm or GroupNorm
            with gain and shift) or `statistics` (of a BatchNorm).
        has_bias: Whether it has a bias (linear) or shift (norm).
        transposed: Whether its weight is stored `[in, out]` (GPT-2's Conv1D).
        patches: Geometry of a convolution, or None for any other module.
        channels_first: Whether a norm receives `[batch, d, ...]`, not `[..., d]`.
    """

    name: str
    kind: str
    has_bias: bool = True
    transposed: bool = False
    patches: Patches | None = None
    channels_first: bool = False

    @property
    def weight_name(self) -> str:
        """Name of the weight (linear) or gain (norm) in the model's state dict."""
        return f"{self.name}.weight"

    @property
    def bias_name(self) -> str:
        """Name of the bias (linear) or shift (norm)."""
        return f"{self.name}.bias"

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its parameters that are calibrated, which experts have too."""
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


@dataclass(frozen=True)
class BlockModules:
    """A block's modules.

    Attributes:
        sites: Calibrated modules.
        unchanged: Names of other modules with parameters, which stay as merged -> their kinds.
    """

    sites: tuple[Site, ...]
    unchanged: Mapping[str, str]


def find_all_modules(
    model: nn.Module,
    stages: Iterable[Iterable[str]],
    patterns: Sequence[str] | None = None,
    *,
    calibrate_norm: bool,
) -> dict[str, BlockModules]:
    """Find the modules of all blocks that are calibrated, and those that stay as merged.

    Calibrated: nn.Linear, transformers' Conv1D, Conv2d with one group of channels, LayerNorm and
    GroupNorm, and the statistics of BatchNorm. Anything else stays as merged: norms without a
    shift, embeddings, modules with vectors only, routers of mixtures and their experts.

    Args:
        model: The model.
        stages: Its blocks, as its family lists them.
        patterns: Those of the modules to calibrate, as in `Options.modules`.
        calibrate_norm: Whether gains and shifts of norms change.

    Returns:
        The modules of each block, in order of registration.

    Raises:
        CalibrationError: If a module's weight is quantised, shared, or carries an adapter, a
            pattern matches no module, or no module remains.
    """
    shared, blocks = dict[int, list[str]](), dict[str, BlockModules]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    for block in (block for stage in stages for block in stage):
        blocks[block] = _find_modules(model, block, patterns, calibrate_norm, shared)
    names = [site.name for modules in blocks.values() for site in modules.sites]
    names += [name for modules in blocks.values() for name in modules.unchanged]
    for pattern in patterns or ():
        if not any(matches(name, pattern.removeprefix("!")) for name in names):
            raise CalibrationError(
                f"{option('modules', repr(pattern))} matches no module of the blocks; there are "
                f"{names[:6]} and {max(len(names) - 6, 0)} more"
            )
    if not any(site.names for modules in blocks.values() for site in modules.sites):
        if patterns:
            raise CalibrationError(f"{option('modules')} leaves no module to calibrate")
        raise CalibrationError(
            f"the blocks of {type(model).__name__} have no linear module or convolution of images "
            f"to calibrate, only {', '.join(left_out(blocks)) or 'norms'}"
        )
    return blocks


def left_out(blocks: Mapping[str, BlockModules]) -> list[str]:
    """Return the kinds of selected modules with matrices that stay as merged, without repetition.

    Embeddings, norms and modules that patterns exclude are not named.
    """
    kinds = (kind for modules in blocks.values() for kind in modules.unchanged.values() if kind)
    return list(dict.fromkeys(kinds))


def _find_modules(
    model: nn.Module,
    block: str,
    patterns: Sequence[str] | None,
    calibrate_norm: bool,
    shared: Mapping[int, Sequence[str]],
) -> BlockModules:
    sites, unchanged = list[Site](), dict[str, str]()
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        if hasattr(module, "lora_A"):
            raise CalibrationError(
                f"block {block}: module {name} carries a LoRA adapter; merge it into its weight "
                "first (peft: model.merge_and_unload())"
            )
        selected = is_selected(name, patterns)
        if isinstance(module, _BatchNorm) and module.track_running_stats and selected:
            sites.append(Site(name, "statistics"))
            continue
        direct = dict(module.named_parameters(recurse=False))
        # MultiheadAttention multiplies by the weight of its out_proj, which never runs.
        owner = model.get_submodule(name.rpartition(".")[0])
        if not direct or isinstance(owner, nn.MultiheadAttention):
            continue
        routed = _is_routed(model, name)
        site = site_of(name, module) if selected and not routed else None
        if site is None or (site.kind == "norm" and not calibrate_norm):
            # Vectors may be stored as [1, 1, 1, d] (ConvNeXt V2).
            matrices = any(p.ndim > 1 and not p.numel() == p.shape[-1] > 1 for p in direct.values())
            named = selected and matrices and not isinstance(module, nn.Embedding)
            kind = "routed experts" if routed else type(module).__name__
            unchanged[name] = kind if named else ""
            continue
        _refuse_unusable(block, name, direct, shared)
        sites.append(site)
    return BlockModules(tuple(sites), unchanged)


def _is_routed(model: nn.Module, name: str) -> bool:
    """Return whether a module belongs to a mixture: one of its experts, or their router."""
    owner, _, leaf = name.rpartition(".")
    router = leaf in ("gate", "router") and hasattr(model.get_submodule(owner), "experts")
    return router or "experts" in name.split(".")


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


def exclusion(names: Iterable[str], block: str = "") -> str:
    """Return the option that excludes modules, which are named as in their block if it is given."""
    return option("modules", [f"!{name.removeprefix(f'{block}.')}" for name in names])


def _refuse_unusable(
    block: str, name: str, direct: Mapping[str, Tensor], shared: Mapping[int, Sequence[str]]
) -> None:
    for leaf, parameter in direct.items():
        names, reason = shared[id(parameter)], ""
        if not parameter.is_floating_point():
            reason = f"is quantised ({parameter.dtype}): load the merged model in a floating dtype"
        elif len(names) > 1:
            reason = f"is one parameter under the names {names}; it has no update of its own"
        if reason:
            raise CalibrationError(
                f"block {block}: {name}.{leaf} {reason}. Or exclude it: {exclusion([name])}"
            )


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
            module: Any = kind(*sizes)
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
            x, weight, bias = torch.randn(3, 4, generator=generator), module.weight, module.bias
            if base is nn.Linear:
                expected = linear(x, weight, bias)
            else:
                expected = layer_norm(x, x.shape[-1:], weight, bias, module.eps)
            return bool(torch.allclose(module(x), expected, rtol=1e-4, atol=1e-4))
    except Exception:  # a class that takes other arguments
        return None
