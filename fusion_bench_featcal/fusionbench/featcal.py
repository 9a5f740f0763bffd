"""FeatCal as a method, whose settings are the calibration's."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.json_files import json_lines, json_text
from fusion_bench_featcal.fusionbench.config_checks import check_tasks_have_data
from fusion_bench_featcal.fusionbench.data import with_calibration_data
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.rows import Method
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.results.names import calibration_log, file_suffix
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.checkpoint import open_checkpoint
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


class FeatCal(FeatCalSettings, Method):
    """Calibrates a merged model."""

    name = "featcal"
    changes_merged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.rule_object  # raises if it cannot be made

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """All settings."""
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, fit for JSON."""
        return self.with_rule_defaults.as_dict()

    def title(self, row: str) -> str:
        """Return what happens when row `row` is made, for the screen."""
        rule = self.rule if isinstance(self.rule, str) else type(self.rule_object).__name__
        return f"calibrating {row} (rule={rule})"

    @cached_property
    def _last(self) -> dict[str, Any]:
        """Log, reads and cost of the last calibration."""
        return {}

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a folder of finished blocks, a base or data that cannot be used.

        Raises:
            CalibrationError: Naming the setting.
            ReportError: If the folder cannot be written.
        """
        for sentence in self.extremes:
            log.warning(sentence)
        with open_checkpoint(self, inputs.processes):
            pass  # raises if it cannot be used
        if self.rule_object.needs_base:
            inputs.require_base("anchors need", ", or set method.anchor_rho to 1")
        # Before models are downloaded: the config alone does not name the data of every pool.
        pool, split = with_calibration_data(inputs.modelpool, self), self.calibration_split
        check_tasks_have_data(pool.model_names, getattr(pool, f"{split}_dataset_names"), split)

    def open(self, inputs: MethodInputs) -> None:
        """Open the data, and refuse a calibration that cannot succeed.

        Raises:
            CalibrationError: If data cannot be opened, or the read budget is too small.
        """
        for name, expert in inputs.models.experts.items():
            if self.expert_read_budget and expert.module is None and expert.files is None:
                raise CalibrationError(
                    "method.expert_read_budget needs experts in safetensors files, unlike "
                    f"{name!r} (modelpool.models.{name}): save it as safetensors, or set the "
                    "budget to null"
                )
        self.open_batches(inputs)

    def charge_upstream_reads(self, upstream: Upstream) -> None:
        """Count the reads of a merger as those of the next calibration.

        Raises:
            CalibrationError: If they exceed the read budget.
        """
        upstream.budget_left(self)
        self._opened["upstream"] = upstream

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Calibrate the merged model. Raises a CalibrationError if that cannot go on."""
        processes = inputs.processes
        upstream: Upstream | None = self._opened.pop("upstream", None)
        budget = upstream.budget_left(self) if upstream else self.expert_read_budget
        batches = self.take_batches(inputs)
        exchanged = processes.exchanged_bytes
        result = calibrate(
            merged,
            inputs.base(),
            inputs.experts(),
            batches,
            self.complete(expert_read_budget=budget),
            device=inputs.fabric.device,
            autocast=inputs.fabric.autocast,
            processes=processes,
        )
        self.sample_counts.update((r["task"], r["samples"]) for r in result.log.select("task"))
        merger_bytes = upstream.reads() if upstream else None
        reads = result.reads | {"budget": self.expert_read_budget, "upstream": merger_bytes}
        cost = _cost(reads, result.log.records)
        if processes.size > 1:
            exchanged = processes.exchanged_bytes - exchanged
            cost |= {"processes": processes.size, "exchanged_bytes": exchanged}
        self._last.update(log=result.log, reads=reads, cost=cost)
        return result.model

    def facts(self, row: str, model: nn.Module, tasks: Sequence[str]) -> Facts:
        """Return also the figures of the log, and the files of log and reads."""
        log, reads = self._last["log"], self._last["reads"]
        facts = calibration_facts(row, self, log.records, self.samples(tasks))
        return replace(
            facts,
            cost=super().facts(row, model, tasks).cost | self._last["cost"],
            files={
                calibration_log(row): json_lines(log.plain_records()),
                f"reads{file_suffix(row)}.json": json_text(reads),
            },
        )


def _cost(reads: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the bytes of experts that were read, with those of the merger, and resumed blocks."""
    cost = dict[str, float]()
    for record in records:
        if record["kind"] == "resumed":
            cost["restored_blocks"] = record["blocks"]
    merger_bytes = (reads["upstream"] or {}).get("experts", 0)
    if merger_bytes is not None:  # else it is not known
        cost["expert_bytes"] = merger_bytes + sum(reads["experts"].values())
    return cost
