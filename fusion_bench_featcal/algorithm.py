"""FeatCal as a FusionBench method: connects pools, task pools and mergers to the calibration."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.fusionbench.inputs import MethodInputs
from fusion_bench_featcal.fusionbench.method import CalibratingMethod
from fusion_bench_featcal.fusionbench.options import MERGED, RunSettings, plain
from fusion_bench_featcal.fusionbench.pool_checks import check_experts
from fusion_bench_featcal.fusionbench.program_processes import (
    join_processes,
    share_model,
)
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.results import Cost, measure
from fusion_bench_featcal.rules import rule_of
from fusion_bench_featcal.run.problem import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


class FeatCalAlgorithm(CalibratingMethod):
    """Merges with any FusionBench method, calibrates, and evaluates the requested models.

    Run by `fusion_bench method=featcal modelpool=...`. In Python, `run(modelpool)` returns the
    calibrated model.
    """

    setting_kinds = (FeatCalSettings, RunSettings)

    def on_run_start(self) -> None:
        """Join other processes. The first one prepares the run."""
        self._processes = join_processes(self)
        if self._processes.rank == 0:
            super().on_run_start()

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, calibrate, evaluate and report.

        Args:
            modelpool: The pool with the base (`_pretrained_`), the experts, their calibration data
                and, without `base_method`, the `_merged_` model.

        Returns:
            The model of the row `save`, by default the one calibrated with the method's settings.

        Raises:
            CalibrationError: If the run cannot go on. No partial files remain.
        """
        if self._processes.size == 1:  # a launcher starts several processes itself
            self._processes = join_processes(self)
        model = self._run(modelpool)
        self._processes.gather(None)  # no process ends without error if the first one fails
        return model

    def _run(self, modelpool: BaseModelPool) -> nn.Module:
        """Run in one of several processes. All but the first only take part in the calibration."""
        choices, rows = self.choices, self.rows
        inputs = self.inputs(modelpool)
        self.check(inputs)
        # Datasets are opened before a merger that may take hours.
        batches, upstream = self.open(inputs), self.upstream(inputs)
        results = RunResults(
            self, modelpool, inputs.processor, upstream=upstream.name, row=choices.save
        )
        merged = self._merge(inputs, upstream, results)
        results.saver.offer(merged, CardFacts(MERGED, self.base_method))
        alone = len(rows) == 1 or self._processes.size > 1
        for name, settings in rows.items():
            with results.surviving(name, alone=alone):
                calibrated = self._calibrate(
                    name, settings, merged, batches[name], inputs, upstream
                )
                results.add_calibrated(name, settings, self.base_method, *calibrated)
                del calibrated  # frees a model before the next one
        self._processes.doing = "evaluations of references and the report"
        if self._processes.rank > 0:
            return results.saver.model
        if MERGED in (*choices.compare_with, choices.save):
            results.add_row(upstream.name, merged, settings=plain(self.base_method))
        del merged
        results.add_base_and_experts(choices.compare_with)
        return results.finish()

    def _merge(self, inputs: MethodInputs, upstream: Upstream, results: RunResults) -> nn.Module:
        """Return the merged model."""
        merged = None
        self._processes.doing = "the upstream merger (method.base_method)"
        if self._processes.rank == 0:
            results.add_notes(check_experts(inputs.models, self.settings))
            merged = upstream.merged_model(self._program)
        return share_model(merged, self._processes, self.fabric.device)

    def _calibrate(
        self,
        name: str,
        settings: FeatCalSettings,
        merged: nn.Module,
        batches: Mapping[str, Iterable[Any]],
        inputs: MethodInputs,
        upstream: Upstream,
    ) -> tuple[CalibrationResult, Cost]:
        """Calibrate one row. The first row's reads include those of the upstream merger."""
        first, processes, fabric = settings is self.settings, self._processes, self.fabric
        rule = settings.rule if isinstance(settings.rule, str) else type(rule_of(settings)).__name__
        log.info("calibrating %s (rule=%s)", name, rule)
        log.debug("settings of %s: %s", name, settings.as_dict())
        budget = upstream.budget_left(settings) if first else settings.expert_read_budget
        limited = settings.replace(expert_read_budget=budget)
        exchanged = processes.exchanged_bytes
        with measure() as cost:
            base, experts = inputs.base(), inputs.experts()
            result = calibrate(
                merged,
                base,
                experts,
                batches,
                limited,
                device=fabric.device,
                autocast=fabric.autocast,
                processes=processes,
            )
        if processes.size > 1:
            cost.more["processes"] = processes.size
            cost.more["exchanged_bytes"] = processes.exchanged_bytes - exchanged
        result.reads["budget"] = settings.expert_read_budget
        result.reads["upstream"] = upstream.reads() if first else None
        for record in result.log.of_kind("resumed"):
            cost.more["restored_blocks"] = record["blocks"]
        of_merger = (result.reads["upstream"] or {}).get("experts", 0)
        if of_merger is not None:
            cost.more["expert_bytes"] = of_merger + sum(result.reads["experts"].values())
        return result, cost
