"""Upstream merger of a run, with its count of reads."""

from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.budget import budget_left
from fusion_bench_featcal.fusionbench.fusing import merged_from_files
from fusion_bench_featcal.fusionbench.options import MERGED, method_name
from fusion_bench_featcal.fusionbench.pool_models import (
    MERGED_MODEL,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.settings import FeatCalSettings


class Upstream:
    """The upstream merger of a run.

    Attributes:
        config: `method.base_method`, or None if the pool has the merged model.
        name: Name of its row in reports.
    """

    def __init__(self, config: Any, models: PoolModels) -> None:
        """Refer to the merger, which has not run yet.

        Args:
            config: `method.base_method`, checked by `check_merger`.
            models: The pool's models.

        Raises:
            CalibrationError: If there is neither a merger nor a merged model in the pool, or the
                merger cannot be imported.
        """
        if config is None and not models.pool.has_merged:
            raise CalibrationError(
                "method.base_method is null, but the pool has no merged model: name one as "
                f"modelpool.models.{MERGED_MODEL}, or choose a merger "
                "(method@method.base_method=task_arithmetic)"
            )
        target = None if config is None else config.get("_target_")
        if target is not None:
            import_target("method.base_method", target)
        self.config = config
        self.name = MERGED if config is None else method_name(config)
        self._models = models

    def merged_model(self, program: Any) -> nn.Module:
        """Merge, or load the pool's merged model.

        Args:
            program: The running program, or None.

        Raises:
            CalibrationError: If it cannot be loaded, or the merger does not return exactly one
                model.
        """
        if self.config is None:
            return load_pool_model(self._models.pool, MERGED_MODEL)
        merged = merged_from_files(self.config, self._models)
        if merged is not None:
            return merged
        return run_merger(program, self.config, self._models.pool, "method.base_method")

    def budget_left(self, settings: FeatCalSettings) -> float | str | None:
        """Return the rest of a read budget for the calibration, or None without a limit.

        Raises:
            CalibrationError: If the merger alone reads more than the budget.
        """
        budget = settings.expert_read_budget
        if budget is None or self.config is None:
            return budget
        read = sum(expert.file_bytes or 0 for expert in self._models.experts.values())
        return budget_left(budget, read, self.name)

    def reads(self) -> dict[str, Any]:
        """Return the bytes of all files that the merger reads, None if they are not known."""
        if self.config is None:
            return {"merger": None, "merged": self._models[MERGED_MODEL].file_bytes}
        sizes = [expert.file_bytes for expert in self._models.experts.values()]
        base = None if self.name == "simple_average" else self._models.base
        return {
            "merger": self.name,
            "experts": None if None in sizes else sum(size or 0 for size in sizes),
            "base": 0 if base is None else base.file_bytes,
        }
