"""FusionBench's simple average and task arithmetic, fused with the calibration's reads."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from numbers import Real
from typing import Any

from fusion_bench import BaseModelPool
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm
from fusion_bench.utils.state_dict_arithmetic import (
    state_dict_add,
    state_dict_div,
    state_dict_mul,
    state_dict_sub,
)
from hydra.utils import get_object
from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.experts.merging import UpstreamMerge
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.fusionbench.options import FUSION_BENCH_KEYS, plain
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    checkpoint_path,
    file_source,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.program import upstream_model
from fusion_bench_featcal.fusionbench.reads import budget_beside_merger
from fusion_bench_featcal.fusionbench.run_results import method_name
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)

_OPTIONS = {"_target_", "inplace", "show_pbar", "scaling_factor", *FUSION_BENCH_KEYS}


def checked_fusing(fuse: Any) -> bool | str:
    """The setting `fuse_merge`.

    Raises:
        ValueError: If it is anything but `auto` or False.
    """
    if fuse != "auto" and fuse is not False:
        raise ValueError(f"method.fuse_merge must be auto or false, got {fuse!r}")
    return fuse


def start_upstream(
    program: Any,
    base_method: Any,
    modelpool: BaseModelPool,
    settings: FeatCalSettings,
    *,
    fuse: bool | str,
    processes: int,
) -> tuple[nn.Module, UpstreamMerge | None]:
    """Merge; or, where merging can share the calibration's reads, prepare to.

    Args:
        program: The running program, or None.
        base_method: `method.base_method`.
        modelpool: The pool.
        settings: Settings of the first calibration, which would complete the merged model.
        fuse: `method.fuse_merge`: `auto` or False.
        processes: Number of processes.

    Returns:
        The merged model and None; or the model that is to become it, and the merger.

    Raises:
        CalibrationError: As `upstream_model`; or if a read budget cannot be kept.
    """
    if base_method is not None:
        name = method_name(base_method)
        prepared = _why_not(base_method, modelpool, settings, fuse, processes)
        prepared = prepared or _prepare(base_method, modelpool)
        if not isinstance(prepared, str):
            log.info("%s shares the calibration's reads: each expert is read once", name)
            return prepared
        log.info("%s runs by itself: %s", name, prepared)
        budget_beside_merger(modelpool, base_method, settings, fused=False)
    return upstream_model(program, base_method, modelpool), None


def check_merger_budget(
    base_method: Any, modelpool: BaseModelPool, settings: FeatCalSettings, fuse: Any, processes: int
) -> None:
    """Refuse a read budget that the upstream merger exceeds, before anything is loaded.

    Raises:
        CalibrationError: If it does.
    """
    if base_method is not None and settings.expert_read_budget is not None:
        fused = not _why_not(base_method, modelpool, settings, fuse, processes)
        budget_beside_merger(modelpool, base_method, settings, fused=fused)


def _why_not(
    base_method: Any, modelpool: BaseModelPool, settings: FeatCalSettings, fuse: Any, processes: int
) -> str:
    """Reason against fusing a merger, as far as configs and headers tell; empty if none."""
    if fuse is False:
        return "method.fuse_merge is false"
    merger = merger_class(base_method)
    if merger is None:
        return "it is neither plain simple average nor plain task arithmetic"
    if processes > 1:
        return "there are several processes, of which each reads only its own experts"
    if settings.stream_experts is False:
        return "method.stream_experts is false"
    if merger is TaskArithmeticAlgorithm and not modelpool.has_pretrained:
        return f"the pool has no modelpool.models.{BASE_MODEL}"
    names = _models_of(merger, modelpool)
    for name in names:
        if type(_source(modelpool, name)) is not SafetensorsExpert:
            return f"{name} does not lie whole in safetensors files"
    if len({_entry_but_path(modelpool, name) for name in names}) > 1:
        return "the pool loads its models in different ways"
    return ""


def merger_class(base_method: Any) -> type | None:
    """FusionBench's class of a plain simple average or task arithmetic; None of all others."""
    config = plain(base_method)
    if set(config) - _OPTIONS or "_target_" not in config:
        return None
    try:
        found = get_object(config["_target_"])
    except Exception:  # whatever is wrong with it, running the merger says so
        return None
    if found is TaskArithmeticAlgorithm:
        scale = config.get("scaling_factor")
        return found if isinstance(scale, Real) and not isinstance(scale, bool) else None
    return found if found is SimpleAverageAlgorithm and "scaling_factor" not in config else None


def _models_of(merger: type, modelpool: BaseModelPool) -> list[str]:
    """The models that a merger reads, the one that it begins with first."""
    experts = list(modelpool.model_names)
    return [BASE_MODEL, *experts] if merger is TaskArithmeticAlgorithm else experts


def _source(modelpool: BaseModelPool, name: str) -> Any:
    try:
        return file_source(modelpool, name)
    except FileNotFoundError:
        return None


def _entry_but_path(modelpool: BaseModelPool, name: str) -> str:
    entry = plain(modelpool._models[name])
    options = dict(entry) if isinstance(entry, Mapping) else {}
    options.pop("pretrained_model_name_or_path", None)
    return json.dumps(options, sort_keys=True, default=str)


def _prepare(base_method: Any, modelpool: BaseModelPool) -> tuple[nn.Module, UpstreamMerge] | str:
    """The model that becomes the merged one, and the merger; or what keeps it from being fused.

    Experts are read from files in the dtype that the pool would load them in: that is known where
    all models are stored and configured alike.
    """
    merger = merger_class(base_method)
    assert merger is not None
    names = _models_of(merger, modelpool)
    if len({_configured_dtypes(modelpool, name) for name in names}) > 1:
        return "the models' configs name different dtypes"
    model = load_pool_model(modelpool, names[0])
    if not isinstance(model, nn.Module) or _target_modules(model) is not None:
        return f"the pool loads {type(model).__name__} objects, or merges a part of them only"
    if not _stored_alike(modelpool, names, model):
        return "the models are stored in different dtypes"
    description = {
        "fused": method_name(base_method),
        "models": names,
        "fusion_bench": version("fusion_bench"),
    }
    own, merge = names[0], _average
    if merger is TaskArithmeticAlgorithm:
        scale = plain(base_method)["scaling_factor"]
        description["scaling_factor"] = scale
        own, merge = None, _arithmetic(scale)
    return model.requires_grad_(False), UpstreamMerge(merge, own, description)


def _target_modules(model: nn.Module) -> Any:
    return getattr(model, "_fusion_bench_target_modules", None)


def _configured_dtypes(modelpool: BaseModelPool, name: str) -> frozenset[str]:
    """Every dtype that a model's config.json names."""
    path = checkpoint_path(modelpool, name)
    file = None if path is None else path / "config.json"
    if file is None or not file.is_file():
        return frozenset()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CalibrationError(
            f"{file} is damaged: {error}. Check modelpool.models.{name}"
        ) from error
    parts = [content, *(part for part in content.values() if isinstance(part, Mapping))]
    found = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return frozenset(str(dtype) for dtype in found if dtype is not None)


def _stored_alike(modelpool: BaseModelPool, names: Sequence[str], model: nn.Module) -> bool:
    """Return whether every tensor has one dtype in all files."""
    dtypes = []
    for name in names:
        source = _source(modelpool, name)
        keys = ExpertModel(name, source, model).keys
        dtypes.append({wanted: source.stored_dtype(key) for wanted, key in keys.items()})
    return all(found == dtypes[0] for found in dtypes)


# FusionBench's own functions on one tensor at a time, in the order in which its classes call them:
# the merged model has the same bits.


def _average(own: Tensor, experts: Sequence[Tensor]) -> Tensor:
    total = {"": experts[0]}
    for expert in experts[1:]:
        total = state_dict_add(total, {"": expert})
    return state_dict_div(total, len(experts))[""]


def _arithmetic(scale: float) -> Callable[[Tensor, Sequence[Tensor]], Tensor]:
    def merge(own: Tensor, experts: Sequence[Tensor]) -> Tensor:
        base = {"": own}
        total = state_dict_sub({"": experts[0]}, base)
        for expert in experts[1:]:
            total = state_dict_add(total, state_dict_sub({"": expert}, base))
        total = state_dict_mul(total, scale, keep_dtype_when_zero=True)
        return state_dict_add(base, total)[""]

    return merge
