"""The modules of each block: which are calibrated, and which are left unchanged."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.words import option
from fusion_bench_featcal.modules.mixtures import (
    Mixture,
    is_mixture,
    is_router,
    mixture_of,
    router_site,
)
from fusion_bench_featcal.modules.sites import (
    Site,
    exclusion,
    is_named,
    is_selected,
    matches,
    site_of,
)


@dataclass(frozen=True)
class BlockModules:
    """A block's modules.

    Attributes:
        sites: Calibrated modules.
        unchanged: Name of each module with parameters that is left unchanged -> its kind, or None
            for embeddings, norms and modules that patterns exclude.
        mixtures: Routed experts that are calibrated after these modules, one by one.
    """

    sites: tuple[Site, ...]
    unchanged: Mapping[str, str | None]
    mixtures: tuple[Mixture, ...] = ()

    @property
    def all_sites(self) -> list[Site]:
        """Calibrated modules, and the matrices of routed experts."""
        return [*self.sites, *(site for mixture in self.mixtures for site in mixture.sites)]


def find_all_modules(
    model: nn.Module,
    stages: Iterable[Iterable[str]],
    patterns: Sequence[str] | None = None,
    *,
    calibrate_norm: bool,
) -> dict[str, BlockModules]:
    """Find the modules of all blocks, and which of them are calibrated.

    Calibrated: nn.Linear, transformers' Conv1D, Conv2d with one group of channels, LayerNorm and
    GroupNorm, the statistics of BatchNorm, and routed experts in the layout of transformers 5.
    Anything else is left unchanged: norms without a shift, embeddings, modules with vectors only,
    other routed experts, and routers unless a pattern names them.

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
    names = [site.name for modules in blocks.values() for site in modules.all_sites]
    names += [name for modules in blocks.values() for name in modules.unchanged]
    for pattern in patterns or ():
        if not any(matches(name, pattern.removeprefix("!")) for name in names):
            raise CalibrationError(
                f"{option('modules', repr(pattern))} matches no module of the blocks; there are "
                f"{names[:6]} and {max(len(names) - 6, 0)} more"
            )
    if not any(site.names for modules in blocks.values() for site in modules.all_sites):
        if patterns:
            raise CalibrationError(f"{option('modules')} leaves no module to calibrate")
        raise CalibrationError(
            f"the blocks of {type(model).__name__} have no linear module or convolution of images "
            f"to calibrate, only {', '.join(left_out(blocks)) or 'norms'}"
        )
    return blocks


def left_out(blocks: Mapping[str, BlockModules]) -> list[str]:
    """Return the kinds of selected modules with matrices that are left unchanged, each once.

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
    sites, mixtures, unchanged = list[Site](), list[Mixture](), dict[str, str | None]()
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
        if is_mixture(module):
            mixture = mixture_of(name, module, patterns)
            chosen = {path.rpartition(".")[2] for path in mixture.parameters}
            _refuse_unusable(block, name, {leaf: direct[leaf] for leaf in chosen}, shared)
            excluded = {mixture.entry, mixture.exit}.difference(mixture.sites)
            unchanged |= dict.fromkeys(sorted(site.name for site in excluded))
            mixtures += [mixture] if mixture.sites else []
            continue
        kind = _kind_in_mixture(model, name)
        site = None
        if kind == "router" and is_named(name, patterns):
            site = router_site(name, module)
        elif selected and not kind:
            site = site_of(name, module)
        if site is None or (site.kind == "norm" and not calibrate_norm):
            # Vectors may be stored as [1, 1, 1, d] (ConvNeXt V2).
            matrices = any(p.ndim > 1 and not p.numel() == p.shape[-1] > 1 for p in direct.values())
            named = selected and matrices and not isinstance(module, nn.Embedding)
            unchanged[name] = (kind or type(module).__name__) if named else None
            continue
        _refuse_unusable(block, name, direct, shared)
        sites.append(site)
    return BlockModules(tuple(sites), unchanged, tuple(mixtures))


def _kind_in_mixture(model: nn.Module, name: str) -> str | None:
    """Return the kind of a module in a mixture, or None for modules outside of mixtures."""
    parts = name.split(".")
    if "experts" in parts:
        return "routed experts"
    owners = (model.get_submodule(".".join(parts[:end])) for end in range(len(parts)))
    return "router" if any(map(is_router, owners, parts)) else None


def _refuse_unusable(
    block: str, name: str, direct: Mapping[str, Tensor], shared: Mapping[int, Sequence[str]]
) -> None:
    for leaf, parameter in direct.items():
        names, reason = shared[id(parameter)], ""
        if not parameter.is_floating_point():
            reason = f"is quantized ({parameter.dtype}): load the merged model in a floating dtype"
        elif len(names) > 1:
            reason = f"is shared under the names {names}, so it cannot be updated separately"
        if reason:
            raise CalibrationError(
                f"block {block}: {name}.{leaf} {reason}. Or exclude it: {exclusion([name])}"
            )
