"""Modules of a block that are calibrated, and how their parameters are read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from fusion_bench_featcal.core.patches import Patches
from fusion_bench_featcal.engine.mixtures import Mixture, find_mixtures
from fusion_bench_featcal.engine.module_kinds import is_layer_norm, is_linear
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings


@dataclass(frozen=True)
class Site:
    """One calibrated module of a block.

    Attributes:
        name: Its full name in the model.
        kind: `linear` (convolutions too: linear maps of patches), `norm` (LayerNorm or GroupNorm
            with gain and shift) or `batch_norm`.
        transposed: Whether its weight is stored `[in, out]` (GPT-2's Conv1D).
        has_bias: Whether it has a bias (linear) or shift (norm); of BatchNorm whether gain and
            shift are calibrated.
        patches: Geometry of a convolution; None for any other module.
        channels_first: Whether a norm receives `[batch, d, ...]`, not `[..., d]`.
        routed: Whether it is in an expert of a mixture: it receives what a router sends it.
    """

    name: str
    kind: Literal["linear", "norm", "batch_norm"]
    transposed: bool
    has_bias: bool
    patches: Patches | None = None
    channels_first: bool = False
    routed: bool = False

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
        """Names of its parameters that are calibrated."""
        if self.kind == "batch_norm" and not self.has_bias:
            return ()
        return (self.weight_name, self.bias_name) if self.has_bias else (self.weight_name,)

    def oriented(self, weight: Tensor) -> Tensor:
        """A stored weight as `[out, in]`; of a convolution its groups' one below the other."""
        if self.patches is not None:
            return weight.flatten(1)
        return weight.T if self.transposed else weight

    def stored(self, weight: Tensor) -> Tensor:
        """A weight `[out, in]` as it is stored."""
        if self.patches is not None:
            return weight.reshape(len(weight), -1, *self.patches.kernel)
        return weight.T if self.transposed else weight

    @property
    def groups(self) -> int:
        """Number of linear maps, each of its own inputs, that it is made of."""
        return 1 if self.patches is None else self.patches.groups


@dataclass(frozen=True)
class BlockModules:
    """A block's modules.

    Attributes:
        sites: Those that are solved from their inputs.
        left: Those with parameters that stay merged.
        batch_norms: Those whose statistics or parameters change when the others have.
        mixtures: Routers and experts; what `sites` has of these is `routed`.
        unrouted: Number of the experts' modules that stay merged, as no sums of them are made.
    """

    sites: tuple[Site, ...]
    left: tuple[str, ...]
    batch_norms: tuple[Site, ...] = ()
    mixtures: tuple[Mixture, ...] = ()
    unrouted: int = 0

    def calibrated(self, *, biased: bool) -> list[str]:
        """Names of the parameters that get new values.

        Args:
            biased: Whether biases of linear modules do, too.
        """
        return [
            name
            for site in (*self.sites, *self.batch_norms)
            for name in site.names
            if site.kind != "linear" or name == site.weight_name or biased
        ]


def find_modules(
    model: nn.Module, block: str, settings: FeatCalSettings, *, routed: bool = True
) -> BlockModules:
    """Sort a block's modules into calibrated ones and ones that stay as merged.

    Calibrated: nn.Linear, transformers' Conv1D, Conv1d and Conv2d, and LayerNorm, GroupNorm and
    BatchNorm. Left: norms without a shift, embeddings, modules that hold vectors only, and routers
    of mixtures: what they decide is discrete, and experts are solved from what they decide now.
    Everything else that holds a matrix is refused, never skipped.

    Args:
        model: The model.
        block: The block's name.
        settings: `modules`, `calibrate_norm` and `batch_norm` are used.
        routed: Whether the experts' modules of mixtures are calibrated.

    Returns:
        The sorted modules, in order of registration.

    Raises:
        CalibrationError: If a module cannot be calibrated and is not excluded, or its weight is
            quantised or shared with another module.
    """
    shared = _shared_parameters(model)
    sites: list[Site] = []
    batch_norms: list[Site] = []
    left: list[str] = []
    mixtures, unrouted = find_mixtures(model, block), 0
    routers = {mixture.router for mixture in mixtures}
    for inner, module in model.get_submodule(block).named_modules():
        name = f"{block}.{inner}" if inner else block
        _refuse_adapters(block, name, module)
        own = dict(module.named_parameters(recurse=False))
        if not (own or isinstance(module, _BatchNorm)):
            continue
        selected = _selected(name, settings.modules) and name not in routers
        site = _site(name, module) if selected else None
        if site is None and selected:
            _refuse_matrices(block, name, module, own)
        if site is not None and site.kind == "batch_norm" and not settings.calibrate_norm:
            site = replace(site, has_bias=False)
        owners = [(m, owner) for m in mixtures if (owner := m.owner(name)) is not None]
        unrouted += bool(owners and site is not None and not routed)
        solved = site is not None and (not owners or (routed and site.kind == "linear"))
        if site is None or not solved or _stays(site, settings):
            left.append(name)
            continue
        for mixture, owner in owners:
            site = replace(site, routed=True)
            mixture.sites[owner].append(name)
        _refuse_unusable(block, name, own, shared)
        (batch_norms if site.kind == "batch_norm" else sites).append(site)
    used = tuple(mixture for mixture in mixtures if any(mixture.sites.values()))
    return BlockModules(tuple(sites), tuple(left), tuple(batch_norms), used, unrouted)


def _stays(site: Site, settings: FeatCalSettings) -> bool:
    """Return whether settings leave a module as merged."""
    if site.kind == "batch_norm":
        return settings.batch_norm == "merged" and not site.has_bias
    return site.kind == "norm" and not settings.calibrate_norm


def find_all_modules(
    model: nn.Module,
    stages: Iterable[Iterable[str]],
    settings: FeatCalSettings,
    *,
    routed: bool = True,
) -> dict[str, BlockModules]:
    """Every block's modules, by block.

    Args:
        model: The model.
        stages: Its blocks, as its family lists them.
        settings: As for `find_modules`.
        routed: As for `find_modules`.

    Returns:
        The sorted modules of each block.

    Raises:
        CalibrationError: As `find_modules`; also if a pattern matches no module of any block (most
            likely a misspelling), or no module at all is left to calibrate.
    """
    blocks = {
        block: find_modules(model, block, settings, routed=routed)
        for stage in stages
        for block in stage
    }
    names = [s.name for b in blocks.values() for s in (*b.sites, *b.batch_norms)]
    names += [name for b in blocks.values() for name in b.left]
    for pattern in settings.modules or ():
        if not any(matches(name, pattern.removeprefix("!")) for name in names):
            raise CalibrationError(
                f"method.modules: {pattern!r} matches no module of the blocks; there are "
                f"{names[:6]} and {max(len(names) - 6, 0)} more"
            )
    if not any(b.sites or b.batch_norms for b in blocks.values()):
        raise CalibrationError("method.modules leaves no module to calibrate")
    return blocks


def _site(name: str, module: nn.Module) -> Site | None:
    if is_linear(module) and not is_parametrized(module):
        return Site(name, "linear", transposed=False, has_bias=module.bias is not None)
    if _is_conv1d(module):
        return Site(name, "linear", transposed=True, has_bias=True)
    convolves = _runs_as(module, nn.Conv2d) or _runs_as(module, nn.Conv1d)
    if convolves and not is_parametrized(module):
        return _convolution(name, module)
    if is_layer_norm(module) and module.bias is not None and module.weight.ndim == 1:
        first = getattr(module, "data_format", None) == "channels_first"  # as ConvNeXt's
        return Site(name, "norm", transposed=False, has_bias=True, channels_first=first)
    if _runs_as(module, nn.GroupNorm) and module.affine:
        return Site(name, "norm", transposed=False, has_bias=True, channels_first=True)
    if isinstance(module, _BatchNorm) and module.track_running_stats:
        affine = module.affine
        return Site(name, "batch_norm", transposed=False, has_bias=affine, channels_first=True)
    return None


def _convolution(name: str, module: Any) -> Site:
    """A convolution as linear maps of patches."""
    same = module.padding == "same"
    padding = [0] * len(module.kernel_size) if isinstance(module.padding, str) else module.padding
    pads = [(side, side) for side in padding]
    if same:
        spans = zip(module.kernel_size, module.dilation, strict=True)
        pads = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in spans]
    patches = Patches(
        channels=module.in_channels,
        groups=module.groups,
        kernel=module.kernel_size,
        stride=module.stride,
        dilation=module.dilation,
        padding=tuple(pads),
        mode="constant" if module.padding_mode == "zeros" else module.padding_mode,
    )
    has_bias = module.bias is not None
    return Site(name, "linear", transposed=False, has_bias=has_bias, patches=patches)


def _is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is GPT-2's Conv1D: a linear map stored `[in, out]`."""
    from transformers.pytorch_utils import Conv1D

    return _runs_as(module, Conv1D) and not is_parametrized(module)


def _runs_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module computes what its kind does, with no forward of its own."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def _selected(name: str, patterns: Sequence[str] | None) -> bool:
    if patterns is None:
        return True
    wanted = [p for p in patterns if not p.startswith("!")]
    unwanted = [p[1:] for p in patterns if p.startswith("!")]

    def hit(pattern: str) -> bool:
        return matches(name, pattern)

    return (not wanted or any(map(hit, wanted))) and not any(map(hit, unwanted))


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name or an end of it: `fc1`, `mlp.fc1`, `*.mlp.fc1`."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


def _refuse_matrices(block: str, name: str, module: nn.Module, own: Mapping[str, Tensor]) -> None:
    """Refuse a module that holds a matrix which calibration would silently leave as merged."""
    if isinstance(module, nn.Embedding):
        return
    matrices = [leaf for leaf, parameter in own.items() if not _is_vector(parameter)]
    if matrices or is_parametrized(module):
        inner = name.removeprefix(f"{block}.")
        advice = [f"!{inner}"] + ([f"!{inner}.*"] if next(module.children(), None) else [])
        raise CalibrationError(
            f"block {block}: module {name} is a {type(module).__name__} with "
            f"{matrices or 'parametrized weights'}; only modules that compute what nn.Linear, "
            "Conv1d, Conv2d, GPT-2's Conv1D or a norm do can be calibrated. To leave it as merged, "
            f"exclude it: method.modules={advice}"
        )


def _is_vector(parameter: Tensor) -> bool:
    """Return whether a parameter is a vector, as ConvNeXt V2's `[1, 1, 1, d]` are, too."""
    return parameter.ndim < 2 or parameter.numel() == parameter.shape[-1] > 1


def _refuse_adapters(block: str, name: str, module: nn.Module) -> None:
    if hasattr(module, "lora_A"):
        raise CalibrationError(
            f"block {block}: module {name} carries a LoRA adapter; merge it into its weight first "
            "(peft: model.merge_and_unload())"
        )


def _refuse_unusable(
    block: str, name: str, own: Mapping[str, Tensor], shared: dict[int, list[str]]
) -> None:
    for leaf, parameter in own.items():
        if not parameter.is_floating_point():
            raise CalibrationError(
                f"block {block}: {name}.{leaf} is quantised ({parameter.dtype}); load the merged "
                "model in a floating dtype, or exclude the module by method.modules"
            )
        names = shared[id(parameter)]
        if len(names) > 1:
            raise CalibrationError(
                f"block {block}: {name}.{leaf} is one parameter under the names {names}; it has no "
                f"update of its own. Exclude it: method.modules=['!{name}']"
            )


def _shared_parameters(model: nn.Module) -> dict[int, list[str]]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names
