"""FeatCal as a method, which has the settings of a calibration."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files.json_files import json_lines, json_text
from fusion_bench_featcal.fusionbench.config_checks import check_tasks_have_data
from fusion_bench_featcal.fusionbench.data import with_calibration_data
from fusion_bench_featcal.fusionbench.method import Method, MethodResult
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.results.names import calibration_log, file_suffix
from fusion_bench_featcal.results.remarks import calibration_facts
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.checkpoint import open_checkpoint
from fusion_bench_featcal.run.log import CalibrationLog
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FeatCalResult(MethodResult):
    """A calibrated model.

    Attributes:
        log: The calibration's log.
        reads: Bytes read of base and experts, the read budget, and the upstream merger's reads.
        cost: Numbers about the calibration for the report.
    """

    log: CalibrationLog
    reads: Mapping[str, Any]
    cost: Mapping[str, float]


class FeatCal(FeatCalSettings, Method):
    """Calibrates a merged model."""

    name = "featcal"
    changes_merged: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        vars(self)["rule_object"] = self.make_rule()  # raises a ValueError if it cannot be made

    @property
    def calibration_settings(self) -> FeatCalSettings:
        """All settings."""
        return self

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, as values that JSON can store."""
        return self.with_rule_defaults.as_dict()

    def title(self, name: str) -> str:
        """Return the message that is logged before the model `name` is built."""
        rule = self.rule if isinstance(self.rule, str) else type(self.rule_object).__name__
        return f"calibrating {name} (rule={rule})"

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
                    "method.expert_read_budget needs experts in safetensors files, but "
                    f"{name!r} (modelpool.models.{name}) is not in one: save it as safetensors, or "
                    "set the budget to null"
                )
        self.open_batches(inputs)

    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> FeatCalResult:
        """Calibrate the merged model. Raises a CalibrationError if the calibration cannot go on."""
        processes = inputs.processes
        charged_upstream = inputs.upstream if inputs.charged_method is self else None
        budget = charged_upstream.budget_left(self) if charged_upstream else self.expert_read_budget
        batches = self.take_batches(inputs)
        bytes_before = processes.exchanged_bytes
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
        merger_reads = charged_upstream.reads() if charged_upstream else None
        reads = result.reads | {"budget": self.expert_read_budget, "upstream": merger_reads}
        resumed = result.log.select("resumed")
        cost: dict[str, float] = {"restored_blocks": resumed[-1]["blocks"]} if resumed else {}
        merger_bytes = (merger_reads or {}).get("experts", 0)
        if merger_bytes is not None:  # else the bytes are not known
            cost["expert_bytes"] = merger_bytes + sum(result.reads["experts"].values())
        if processes.size > 1:
            exchanged_bytes = processes.exchanged_bytes - bytes_before
            cost |= {"processes": processes.size, "exchanged_bytes": exchanged_bytes}
        counts = {record["task"]: record["samples"] for record in result.log.select("task")}
        return FeatCalResult(result.model, counts, log=result.log, reads=reads, cost=cost)

    def facts(self, name: str, result: MethodResult) -> Facts:
        """Return also numbers from the log, and the files of log and reads."""
        assert isinstance(result, FeatCalResult)  # of `post_merge`
        facts = calibration_facts(name, self, result.log.records, self.samples(result))
        return replace(
            facts,
            cost={**super().facts(name, result).cost, **result.cost},
            files={
                calibration_log(name): json_lines(result.log.plain_records()),
                f"reads{file_suffix(name)}.json": json_text(result.reads),
            },
        )
