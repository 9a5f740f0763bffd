"""The one run of every method: merge, make the rows, evaluate, report, and save one of them."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.fusionbench.method import DeclaredMethod
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_checks import check_experts
from fusion_bench_featcal.fusionbench.program_processes import join_processes, share_model
from fusion_bench_featcal.fusionbench.report import suite_name
from fusion_bench_featcal.fusionbench.rows import Method, improved
from fusion_bench_featcal.fusionbench.run_settings import MERGED, plain_config
from fusion_bench_featcal.fusionbench.saved_model import check_disks
from fusion_bench_featcal.fusionbench.saved_report import SavedReport
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.devices import usual_torch
from fusion_bench_featcal.run.processes import Processes

log = logging.getLogger(__name__)


class RowsMethod(DeclaredMethod):
    """A FusionBench method that makes rows: models of `Method` objects on one merged model.

    A merger is a single row without a merged model. As the upstream merger of another method it
    returns the row to save, and reports nothing.

    Attributes:
        base_method: Config of the upstream merger, or None for the pool's `_merged_` model.
        shares_processes: Whether several processes of the program share the calibrations.
    """

    base_method: object = None
    shares_processes: ClassVar[bool] = False
    _processes = Processes()

    @property
    def rows(self) -> Mapping[str, Method]:
        """Row -> the method that makes its model."""
        raise NotImplementedError

    @property
    def saved(self) -> str:
        """The row to save and return, of `rows` or `merged`."""
        return next(iter(self.rows))

    @property
    def references(self) -> Sequence[str]:
        """Reference rows to evaluate, of `base`, `experts` and `merged`."""
        return (MERGED,)

    @property
    def planned_rows(self) -> dict[str, int]:
        """Every row is made once."""
        return dict.fromkeys(self.rows, 1)

    @property
    def merges(self) -> bool:
        """True if the only row is a merger."""
        return hasattr(next(iter(self.rows.values())), "merge")

    def facts(self, row: str, model: nn.Module, tasks: Sequence[str]) -> Facts:
        """Return what the report says of a row's model."""
        return self.rows[row].facts(row, model, tasks)

    def watch(self, row: str, model: nn.Module, report: SavedReport, inputs: MethodInputs) -> None:
        """Look at a model before its evaluation. The default does not."""

    def on_run_start(self) -> None:
        """Join other processes. The first one prepares the run."""
        if self.shares_processes:
            self._processes = join_processes(self)
        if self._processes.rank == 0:
            super().on_run_start()

    def inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        """Return the inputs of all rows, with the processes and the upstream merger."""
        inputs = super().inputs(modelpool)
        inputs.processes = self._processes
        inputs.upstream = None if self.merges else Upstream(self.base_method, inputs.models)
        return inputs

    def check(self, inputs: MethodInputs) -> None:
        """Refuse settings that do not fit the pools. Nothing is opened."""
        super().check(inputs)
        for method in self.rows.values():
            method.check(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data of all rows, before a merger that may take hours."""
        super().open(inputs)
        folders = [getattr(method, "checkpoint_dir", None) for method in self.rows.values()]
        check_disks(self._program, inputs.models, folders)
        for method in self.rows.values():
            method.open(inputs)

    @usual_torch()
    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, and make, evaluate and report all rows.

        Args:
            modelpool: The pool with the base (`_pretrained_`), the experts, their calibration data
                and, without `base_method`, the `_merged_` model.

        Returns:
            The model of the row to save.

        Raises:
            ValueError: If a setting does not fit the pools.
            CalibrationError: If the run cannot go on. No partial files remain.
        """
        if self.shares_processes and self._processes.size == 1:
            self._processes = join_processes(self)  # a launcher starts several processes itself
        inputs = self.inputs(modelpool)
        self.check(inputs)
        self.open(inputs)
        if getattr(self._program, "method", self) is not self:  # another method reports
            return self._made(self.rows.get(self.saved), inputs, self._merged(inputs))
        model = self._report_rows(inputs)
        self._processes.gather(None)  # no process ends without error if the first one fails
        return model

    def _report_rows(self, inputs: MethodInputs) -> nn.Module:
        """Make all rows. All processes but the first only take part in the calibrations."""
        processes, upstream = self._processes, inputs.upstream
        name = upstream.name if upstream else next(iter(self.rows))
        report = SavedReport(
            inputs,
            self.log_dir,
            name if self.saved == MERGED else self.saved,
            suite=suite_name(inputs.modelpool),
            merger=name,
            base_method=self.base_method,
        )
        watch = partial(self.watch, report=report, inputs=inputs)
        merged = self._merged(inputs, report)
        merged_facts = Facts(settings=plain_config(self.base_method) or {})
        if merged is not None:
            report.save_if_selected(name, merged, merged_facts)
        for row, method in self.rows.items():
            with report.continue_on_error(row, alone=len(self.rows) == 1 or processes.size > 1):
                log.info(method.title(row))
                log.debug("settings of %s: %s", row, method.settings)
                with measure() as cost:
                    model = self._made(method, inputs, merged)
                facts = self.facts(row, model, inputs.modelpool.model_names)
                report.save_if_selected(row, model, facts)
                watch(row, model)
                report.add(row, model, facts, cost)
                del model  # frees it before the next one
        processes.doing = "evaluations of references and the report"
        if processes.rank > 0:
            return report.model
        if merged is not None and (MERGED in self.references or report.row == name):
            watch(name, merged)
            report.add(name, merged, merged_facts)
        del merged
        report.add_references(self.references, watch)
        return self.finish(report)

    def finish(self, report: SavedReport) -> nn.Module:
        """Write and show the report, and return the model of the row to save."""
        return report.finish()

    def _merged(self, inputs: MethodInputs, report: SavedReport | None = None) -> nn.Module | None:
        """Return the merged model, in every process, or None if the row is a merger."""
        processes, merged = self._processes, None
        if inputs.upstream is None:
            return None
        processes.doing = "the upstream merger (method.base_method)"
        if processes.rank == 0:
            if report is not None:
                family = getattr(next(iter(self.rows.values())), "family", None)
                report.warn(check_experts(inputs.models, family))
            merged = inputs.upstream.merged_model(self._program)
        return share_model(merged, processes, self.fabric.device)

    def _made(self, method: Any, inputs: MethodInputs, merged: nn.Module | None) -> nn.Module:
        """Return the model of a merger, the improved one, or without a method the merged one."""
        if merged is None:
            return method.merge(inputs)
        return merged if method is None else improved(method, merged, inputs)
