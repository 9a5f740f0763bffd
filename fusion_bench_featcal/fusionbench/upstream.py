"""The upstream merger of a run: the merged model that it makes, and what it reads of the pool."""

import logging
from typing import Any

from torch import nn

from fusion_bench_featcal.experts.merging import UpstreamMerge
from fusion_bench_featcal.experts.read_plan import budget_left
from fusion_bench_featcal.fusionbench.fusing import merger_class, prepare_fused, why_not_fused
from fusion_bench_featcal.fusionbench.options import MERGED
from fusion_bench_featcal.fusionbench.pool_models import (
    BASE_MODEL,
    MERGED_MODEL,
    PoolModels,
    import_target,
    load_pool_model,
)
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.fusionbench.run_results import method_name
from fusion_bench_featcal.results.provenance import BY_ITSELF, EARLIER, FUSED, counts_of
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


class Upstream:
    """The upstream merger of a run.

    Attributes:
        config: `method.base_method`; None: the pool's own merged model is taken.
        name: Name of its row in reports.
        fused: Whether it shares the reads of the first calibration. A look at headers tells
            nearly always; `merged_model` has the last word.
        notes: Sentences for the report, once the merged model is complete.
    """

    def __init__(self, config: Any, models: PoolModels) -> None:
        """Refer to the merger, which is not run yet.

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
        self.fused = False
        self._limited = False
        self._omitted: dict[str, list[str]] = {}
        self.notes: list[str] = []
        self._models = models
        self._why_alone = ""

    def plan_reads(self, settings: FeatCalSettings, fuse: bool | str, processes: int) -> None:
        """Find out whether the merger can share the reads of the first calibration.

        Args:
            settings: Settings of that calibration.
            fuse: `method.fuse_merge`: `auto` or False.
            processes: Number of processes.

        Raises:
            CalibrationError: If the merger alone reads more than `expert_read_budget`.
        """
        if self.config is None:
            return
        self._limited = settings.expert_read_budget is not None
        if fuse is False:
            self._why_alone = "method.fuse_merge is false"
        elif processes > 1:
            self._why_alone = (
                "there are several processes, of which each reads only its own experts"
            )
        elif settings.stream_experts is False:
            self._why_alone = "method.stream_experts is false"
        else:
            merger = merger_class(self.config)
            self._why_alone = why_not_fused(merger, self._models, limited=self._limited)
        self.fused = not self._why_alone
        self.budget_left(settings)

    def merged_model(self, program: Any) -> nn.Module:
        """Merge, or load the pool's merged model.

        Raises:
            CalibrationError: If it cannot be loaded, or the merger returns anything but one model.
        """
        if self.config is None:
            return load_pool_model(self._models.pool, MERGED_MODEL)
        return run_merger(program, self.config, self._models.pool, "method.base_method")

    def start(
        self, program: Any, settings: FeatCalSettings
    ) -> tuple[nn.Module, UpstreamMerge | None]:
        """Merge; or, where merging shares the calibration's reads, prepare to.

        Args:
            program: The running program, or None.
            settings: Settings of the first calibration, which would complete the merged model.

        Returns:
            The merged model and None; or the model that is to become it, and the merger.

        Raises:
            CalibrationError: As `merged_model`; or if a read budget cannot be kept.
        """
        if self.fused:
            prepared = prepare_fused(self.config, self.name, self._models, limited=self._limited)
            if not isinstance(prepared, str):
                log.info("%s shares the calibration's reads", self.name)
                return prepared
            self.fused, self._why_alone = False, prepared
        if self.config is not None:
            log.info("%s runs by itself: %s", self.name, self._why_alone)
            self.budget_left(settings)
        return self.merged_model(program), None

    def budget_left(self, settings: FeatCalSettings) -> float | str | None:
        """Rest of a read budget that the merger leaves to the first calibration; None: no limit.

        Raises:
            CalibrationError: If the merger alone reads more than the budget.
        """
        budget = settings.expert_read_budget
        if budget is None or self.config is None:
            return budget
        read = sum(expert.file_bytes or 0 for expert in self._models.experts.values())
        return budget_left(budget, read, self.name, fused=self.fused, why=self._why_alone)

    def add_reads(self, reads: dict[str, Any], *, first: bool) -> None:
        """Add what the merger reads to a calibration's manifest of reads, and to its totals.

        Args:
            reads: The manifest.
            first: Whether the calibration is the run's first; with later ones it reads nothing.
        """
        how = (FUSED if self.fused else BY_ITSELF) if first else EARLIER
        files = {name: self._models[name].file_bytes for name in self._read_besides(how)}
        merger = None if self.config is None else self.name
        if first and self.fused:
            omitted = (reads["plan"] or {}).get("omitted", {})
            self._omitted = {expert: names for expert, names in omitted.items() if names}
            if self._omitted:
                self.notes = [
                    f"{merger} was merged under method.expert_read_budget={reads['budget']}: "
                    f"modules that were not read ({counts_of(self._omitted)}) add no step from the "
                    "base, so it is not the merger of all experts that gains are measured against "
                    "elsewhere"
                ]
        reads["upstream"] = {
            "merger": merger, "how": how, "files": files, "omitted": self._omitted
        }  # fmt: skip
        totals = reads["totals"]
        for key, chosen in (
            ("upstream_experts_read", self._models.experts),
            ("upstream_base_read", [BASE_MODEL]),
            ("merged_read", [MERGED_MODEL]),
        ):
            sizes = [files[name] for name in chosen if name in files]
            totals[key] = None if None in sizes else sum(size for size in sizes if size)
        besides = totals["upstream_experts_read"]
        totals["all_experts_read"] = None if besides is None else totals["experts_read"] + besides

    def _read_besides(self, how: str) -> list[str]:
        """Models that the merger reads itself: what it shares, the calibration counts."""
        if how == EARLIER:
            return []
        if self.config is None:
            return [MERGED_MODEL]
        experts = [] if how == FUSED else list(self._models.experts)
        from_base = self.name != "simple_average" or (how == FUSED and self._limited)
        takes_base = self._models.base is not None and from_base
        return [BASE_MODEL, *experts] if takes_base else experts
