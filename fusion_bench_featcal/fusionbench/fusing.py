"""FusionBench's simple average and task arithmetic, tensor by tensor from files."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from fusion_bench_featcal.fusionbench.options import FUSION_BENCH_KEYS, plain
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    PoolModel,
    PoolModels,
    load_pool_model,
)

Merge = Callable[[Tensor, Sequence[Tensor]], Tensor]
_OPTIONS = {"_target_", "inplace", "show_pbar", "scaling_factor", *FUSION_BENCH_KEYS}


@dataclass(frozen=True)
class FileMerger:
    """A merger that reads one tensor of each model at a time.

    Attributes:
        merge: Takes the first model's tensor and the experts', returns the merged one.
        first: The model from which the merged one has its class and dtypes.
        experts: The experts.
    """

    merge: Merge
    first: PoolModel
    experts: Mapping[str, PoolModel]

    def merged_model(self) -> nn.Module | None:
        """Return the merged model; None if FusionBench would merge a part of it only.

        Raises:
            CalibrationError: If a model cannot be loaded, or a tensor is not finite.
        """
        model = load_pool_model(self.first.pool, self.first.name)
        if getattr(model, "_fusion_bench_target_modules", None) is not None:
            return None

        def opened(source: PoolModel) -> ExpertModel:
            assert source.files is not None
            return ExpertModel(source.name, source.files, model, role="model")

        experts = {name: opened(expert) for name, expert in self.experts.items()}
        first = experts.get(self.first.name) or opened(self.first)
        return fill(model, MergedOnRead(first, experts, self.merge)).requires_grad_(False)


def file_merger(base_method: Any, models: PoolModels) -> FileMerger | str:
    """Return a merger that reads files, or the reason why models must be loaded whole.

    Models are read in the dtype that the pool would load them in. It is known only if the pool
    loads all models in one way, and their files and configs have the same dtypes.

    Args:
        base_method: Config of the merger.
        models: The pool's models.
    """
    merge = _plain_merge(plain(base_method))
    if merge is None:
        return "it is neither plain simple average nor plain task arithmetic"
    experts = models.experts
    if models.base is None and merge is not _average:
        return f"the pool has no modelpool.models.{BASE_MODEL}"
    first = models.base if merge is not _average else next(iter(experts.values()))
    assert first is not None
    used = [first, *experts.values()]
    for model in used:
        if type(model.files) is not SafetensorsExpert:
            return f"{model.name} is not a complete model in safetensors files"
    if len(set(map(_loading, used))) > 1:
        return "the models differ in dtype, or in the way that the pool loads them"
    return FileMerger(merge, first, experts)


def _plain_merge(config: Mapping[str, Any]) -> Merge | None:
    """Return the function of a plain simple average or task arithmetic; None of other mergers."""
    if set(config) - _OPTIONS or "_target_" not in config:
        return None
    try:
        merger = get_object(config["_target_"])
    except Exception:  # running the merger reports what is wrong with it
        return None
    scale = config.get("scaling_factor")
    if merger is SimpleAverageAlgorithm and "scaling_factor" not in config:
        return _average
    if merger is TaskArithmeticAlgorithm and isinstance(scale, Real) and type(scale) is not bool:
        return _arithmetic(scale)
    return None


def _loading(model: PoolModel) -> tuple[str, frozenset[str], frozenset[str]]:
    """Return options, configured dtypes and stored dtypes, which decide how a pool loads files."""
    entry, source, config = plain(model.entry), model.files, model.config or {}
    assert isinstance(source, SafetensorsExpert)
    options = dict(entry) if isinstance(entry, Mapping) else {}
    options.pop("pretrained_model_name_or_path", None)
    sections = [config, *(section for section in config.values() if isinstance(section, Mapping))]
    dtypes = {section.get(key) for section in sections for key in ("dtype", "torch_dtype")}
    stored = {source.stored_dtype(name) for name in source.names()}
    return (
        json.dumps(options, sort_keys=True, default=str),
        frozenset(map(str, dtypes - {None})),
        frozenset(dtype for dtype in stored if "F" in dtype),  # F32, BF16, not I64
    )


# FusionBench's own functions on one tensor at a time, in the order in which its classes call them:
# the merged model has the same bits.


def _average(first: Tensor, experts: Sequence[Tensor]) -> Tensor:
    total = {"": experts[0]}
    for expert in experts[1:]:
        total = state_dict_add(total, {"": expert})
    return state_dict_div(total, len(experts))[""]


def _arithmetic(scale: Any) -> Merge:
    def merge(first: Tensor, experts: Sequence[Tensor]) -> Tensor:
        base = {"": first}
        total = state_dict_sub({"": experts[0]}, base)
        for expert in experts[1:]:
            total = state_dict_add(total, state_dict_sub({"": expert}, base))
        total = state_dict_mul(total, scale, keep_dtype_when_zero=True)
        return state_dict_add(base, total)[""]

    return merge
