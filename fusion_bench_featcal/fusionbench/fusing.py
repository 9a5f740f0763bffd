"""FusionBench's simple average and task arithmetic, tensor by tensor from files."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

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
from fusion_bench_featcal.experts.merged import MergedOnRead, fill
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.fusionbench.options import FUSION_BENCH_KEYS, plain
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    PoolModel,
    PoolModels,
    load_pool_model,
)

_OPTIONS = {"_target_", "inplace", "show_pbar", "scaling_factor", *FUSION_BENCH_KEYS}


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


def why_not_read(merger: type | None, models: PoolModels) -> str:
    """Return the reason against merging from files, as far as configs and headers tell, or "".

    Args:
        merger: `merger_class` of its config.
        models: The pool's models.
    """
    if merger is None:
        return "it is neither plain simple average nor plain task arithmetic"
    if models.base is None and merger is TaskArithmeticAlgorithm:
        return f"the pool has no modelpool.models.{BASE_MODEL}"
    merged = _models_of(merger, models)
    for model in merged:
        if type(model.files) is not SafetensorsExpert:
            return _why_not_read(model)
    if len({_entry_but_path(model) for model in merged}) > 1:
        return "the pool loads its models in different ways"
    if len({_configured_dtypes(model) for model in merged}) > 1:
        return "the models' configs name different dtypes"
    return ""


def _why_not_read(model: PoolModel) -> str:
    """Reason why a model's tensors are not those that safetensors files hold."""
    if model.adapter is not None:
        return f"{model.name} is a LoRA adapter, which is added to its base first"
    if isinstance(model.files, CommonRows):
        return f"modelpool.vocabulary=common_rows cuts the embeddings of {model.name}"
    return f"{model.name} does not lie whole in safetensors files"


def _models_of(merger: type, models: PoolModels) -> list[PoolModel]:
    """Return the models that a merger reads, the one from which it takes dtypes first."""
    experts = list(models.experts.values())
    return [models[BASE_MODEL], *experts] if merger is TaskArithmeticAlgorithm else experts


def _entry_but_path(model: PoolModel) -> str:
    entry = plain(model.entry)
    options = dict(entry) if isinstance(entry, Mapping) else {}
    options.pop("pretrained_model_name_or_path", None)
    return json.dumps(options, sort_keys=True, default=str)


def merge_from_files(base_method: Any, models: PoolModels) -> nn.Module | str:
    """Return the merged model, of which no more than one tensor of each expert was in memory.

    Experts are read from files in the dtype that the pool would load them in: that is known where
    all models are stored and configured alike.

    Args:
        base_method: Config of a merger that `why_not_read` has nothing against.
        models: The pool's models.

    Returns:
        The model, or what keeps it from being merged this way.

    Raises:
        CalibrationError: If a tensor is not finite, naming the model.
    """
    merger = merger_class(base_method)
    assert merger is not None
    merged = _models_of(merger, models)
    model = load_pool_model(models.pool, merged[0].name)
    partial = getattr(model, "_fusion_bench_target_modules", None) is not None
    if not isinstance(model, nn.Module) or partial:
        return f"the pool loads {type(model).__name__} objects, or merges a part of them only"
    opened = {m.name: ExpertModel(m.name, _files(m), model, role="model") for m in merged}
    if not _stored_alike(opened.values()):
        return "the models are stored in different dtypes"
    experts, merge = {name: opened[name] for name in models.experts}, _average
    if merger is TaskArithmeticAlgorithm:
        merge = _arithmetic(plain(base_method)["scaling_factor"])
    return fill(model, MergedOnRead(opened[merged[0].name], experts, merge)).requires_grad_(False)


def _configured_dtypes(model: PoolModel) -> frozenset[str]:
    """Every dtype that a model's config.json names."""
    config = model.config or {}
    parts = [config, *(part for part in config.values() if isinstance(part, Mapping))]
    dtypes = (part.get(key) for part in parts for key in ("dtype", "torch_dtype"))
    return frozenset(str(dtype) for dtype in dtypes if dtype is not None)


def _stored_alike(models: Iterable[ExpertModel]) -> bool:
    """Return whether every tensor has one dtype in all files."""
    dtypes = []
    for model in models:
        source: Any = model.source
        dtypes.append({name: source.stored_dtype(key) for name, key in model.keys.items()})
    return all(stored == dtypes[0] for stored in dtypes)


def _files(model: PoolModel) -> SafetensorsExpert:
    assert isinstance(model.files, SafetensorsExpert)  # as `why_not_read` has found
    return model.files


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
