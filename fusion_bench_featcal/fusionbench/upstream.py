"""Upstream merger of a run, with its count of reads."""

from typing import Any

from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.fusionbench.fusing import merged_from_files
from fusion_bench_featcal.fusionbench.options import MERGED, method_name
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.read_budgets import budget_in_bytes
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

    def add_reads(self, reads: dict[str, Any], *, first: bool) -> None:
        """Add the merger's reads to a calibration's count of reads, and to its totals.

        Args:
            reads: The count.
            first: True for the run's first calibration. Later ones reuse the merged model.
        """
        files = {name: self._models[name].file_bytes for name in self._read()} if first else {}
        merger = None if self.config is None else self.name
        reads["upstream"] = {"merger": merger, "files": files, "earlier": not first}
        totals = reads["totals"]
        for key, names in (
            ("upstream_experts_read", self._models.experts),
            ("upstream_base_read", [BASE_MODEL]),
            ("merged_read", [MERGED_MODEL]),
        ):
            sizes = [files[name] for name in names if name in files]
            totals[key] = None if None in sizes else sum(size for size in sizes if size)
        upstream = totals["upstream_experts_read"]
        totals["all_experts_read"] = None if upstream is None else totals["experts_read"] + upstream

    def _read(self) -> list[str]:
        """Return the names of the models that the merger reads."""
        if self.config is None:
            return [MERGED_MODEL]
        takes_base = self._models.base is not None and self.name != "simple_average"
        return [*([BASE_MODEL] if takes_base else []), *self._models.experts]


def budget_left(budget: float | str, upstream: int, merger: str) -> float | str:
    """Return the rest of a read budget after an upstream merger, which reads every expert whole.

    Args:
        budget: The setting `expert_read_budget`.
        upstream: Bytes of the experts' files.
        merger: The merger's name, for the message.

    Raises:
        CalibrationError: If nothing is left, naming the settings to change.
    """
    if upstream == 0:
        return budget
    limit = budget_in_bytes(budget, upstream)
    if limit > upstream and not str(budget).endswith("%"):
        return limit - upstream
    raise CalibrationError(
        f"method.expert_read_budget={budget} cannot be kept: {merger} reads every expert whole "
        f"({upstream} bytes), before the calibration reads any. Give more bytes than that, or let "
        "the pool bring a merged model (modelpool.models._merged_, method.base_method=null)"
    )
