"""The merging method of a run. Simple ones are computed from files, one tensor at a time."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm
from fusion_bench.programs import FabricModelFusionProgram
from hydra.utils import get_object
from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts import LazyModel
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files.budgets import budget_in_bytes
from fusion_bench_featcal.fusionbench.pool_models import (
    MERGED_MODEL,
    PoolModel,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.fusionbench.run_settings import (
    FUSION_BENCH_KEYS,
    MERGED,
    method_name,
    plain_config,
)
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)

TensorMerge = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""Takes the first model's tensor and the experts' tensors, returns the merged tensor."""
_OPTIONS = {"_target_", "inplace", "show_pbar", "scaling_factor", *FUSION_BENCH_KEYS}


class Upstream:
    """The merging method that makes the initial merged model of a run.

    Attributes:
        config: `method.base_method`, or None if the pool has the merged model.
        name: Name of the merged model in reports.
    """

    def __init__(
        self, config: Any, models: PoolModels, setting: str = "method.base_method"
    ) -> None:
        """Check that the merging method can be imported. It does not run yet.

        Args:
            config: `method.base_method`.
            models: The pool's models.
            setting: The setting with the config, for messages.

        Raises:
            CalibrationError: If there is neither a merging method nor a merged model in the pool,
                or if the method cannot be imported.
        """
        if config is None and not models.pool.has_merged:
            raise CalibrationError(
                "method.base_method is null, but the pool has no merged model: name one as "
                f"modelpool.models.{MERGED_MODEL}, or choose a merging method "
                "(method@method.base_method=task_arithmetic)"
            )
        target = None if config is None else config.get("_target_")
        if target is not None:
            import_target(setting, target)
        self.config = config
        self.name = MERGED if config is None else method_name(config)
        self._models, self._setting = models, setting

    def merged_model(self, program: FabricModelFusionProgram | None) -> nn.Module:
        """Merge, or load the pool's merged model.

        Args:
            program: The running program, or None.

        Raises:
            CalibrationError: If a model cannot be loaded, or the merging method does not return
                exactly one model.
        """
        if self.config is None:
            return load_pool_model(self._models.pool, MERGED_MODEL)
        merged = merge_from_files(self.config, self._models)
        if merged is not None:
            return merged
        return run_merger(program, self.config, self._models.pool, self._setting)

    def budget_left(self, settings: FeatCalSettings) -> float | str | None:
        """Return the part of the read budget that merging leaves, or None without a limit.

        Raises:
            CalibrationError: If merging alone reads more than the budget.
        """
        budget = settings.expert_read_budget
        if budget is None or self.config is None:
            return budget
        read = sum(expert.file_bytes or 0 for expert in self._models.experts.values())
        if read == 0:
            return budget
        limit = budget_in_bytes(budget, read)
        if limit > read and not str(budget).endswith("%"):
            return limit - read
        raise CalibrationError(
            f"expert_read_budget={budget} is too small: {self.name} reads every expert completely "
            f"({read} bytes) before the calibration starts. Give more bytes than that, or a model "
            "that is already merged"
        )

    def reads(self) -> dict[str, Any]:
        """Return the bytes that merging reads by kind of model, None if a size is not known."""
        if self.config is None:
            return {"merger": None, "merged": self._models[MERGED_MODEL].file_bytes}
        sizes = [expert.file_bytes for expert in self._models.experts.values()]
        base = None if self.name == "simple_average" else self._models.base
        return {
            "merger": self.name,
            "experts": None if None in sizes else sum(size or 0 for size in sizes),
            "base": 0 if base is None else base.file_bytes,
        }


def merge_from_files(base_method: object, models: PoolModels) -> nn.Module | None:
    """Merge models with one tensor of each in memory.

    The result equals that of FusionBench bit by bit. Models are read in the dtype in which the pool
    would load them. This dtype is known only if the pool loads all models in the same way, and if
    their files and configs have the same dtypes.

    Args:
        base_method: Config of the merging method.
        models: The pool's models.

    Returns:
        The merged model, or None if FusionBench must load whole models: for another merging method,
        incomplete safetensors files or different dtypes.

    Raises:
        CalibrationError: If a model cannot be loaded.
    """
    merge = _tensor_merge(plain_config(base_method))
    # The merged model takes its class and dtypes from the first model.
    first = next(iter(models.experts.values()), None) if merge is _average_tensors else models.base
    if merge is None or first is None:
        return None
    used = {model.name: model for model in (first, *models.experts.values())}
    if any(type(model.files) is not SafetensorsExpert for model in used.values()):
        return None
    if len(set(map(_loading_options, used.values()))) > 1:
        return None
    model = load_pool_model(models.pool, first.name)
    if getattr(model, "_fusion_bench_target_modules", None) is not None:
        return None  # FusionBench merges these modules only
    log.info("merging with %s, tensor by tensor from files", method_name(base_method))
    opened = {
        name: LazyModel(f"model {name!r}", source.files, model)  # type: ignore[arg-type]
        for name, source in used.items()
    }
    experts = [opened[task] for task in models.experts]
    tensors = model.requires_grad_(False).state_dict(keep_vars=True)
    for tensor, name in {id(tensor): (tensor, name) for name, tensor in tensors.items()}.values():
        start = opened[first.name].tensor(name)
        tensor.copy_(merge(start, [expert.stored(name).to(start.dtype) for expert in experts]))
    return model


def _tensor_merge(config: Mapping[str, Any]) -> TensorMerge | None:
    """Return the merging function of an average or task arithmetic, or None for other methods."""
    if set(config) - _OPTIONS or "_target_" not in config:
        return None
    merger, scale = get_object(config["_target_"]), config.get("scaling_factor")
    if merger is SimpleAverageAlgorithm and "scaling_factor" not in config:
        return _average_tensors
    if merger is TaskArithmeticAlgorithm and isinstance(scale, Real) and type(scale) is not bool:
        return _task_arithmetic(scale)
    return None


def _loading_options(model: PoolModel) -> tuple[str, frozenset[str], frozenset[str]]:
    """Return the loading options, configured dtypes and stored floating-point dtypes."""
    entry, source, config = plain_config(model.entry), model.files, model.config or {}
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


# FusionBench's operations in the same order, so that the merged model is equal bit by bit.


def _average_tensors(first: Tensor, experts: Sequence[Tensor]) -> Tensor:
    total = experts[0]
    for expert in experts[1:]:
        total = total + expert
    return total / len(experts)


def _task_arithmetic(scale: Any) -> TensorMerge:
    def merge(first: Tensor, experts: Sequence[Tensor]) -> Tensor:
        total = experts[0] - first
        for expert in experts[1:]:
            total = total + (expert - first)
        return first + scale * total

    return merge
