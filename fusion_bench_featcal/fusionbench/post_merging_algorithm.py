"""A run of FusionBench: merge, build the models of methods, evaluate, report and save."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.fusionbench.configured_algorithm import ConfiguredAlgorithm
from fusion_bench_featcal.fusionbench.method import Method, MethodResult, run_method
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_checks import check_experts
from fusion_bench_featcal.fusionbench.program_processes import join_processes, share_model
from fusion_bench_featcal.fusionbench.report import suite_name
from fusion_bench_featcal.fusionbench.run_settings import MERGED, plain_config
from fusion_bench_featcal.fusionbench.saved_model import check_disks
from fusion_bench_featcal.fusionbench.saved_report import SavedReport
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.devices import isolated_torch_state
from fusion_bench_featcal.run.processes import Processes

log = logging.getLogger(__name__)


class PostMergingAlgorithm(ConfiguredAlgorithm):
    """A FusionBench method that builds a model with each of its `Method` objects.

    The methods improve the same merged model. If the only method is a merger, there is no merged
    model. All models are evaluated and reported, and one is saved and returned. As the upstream
    merger of another method, the run returns this model without a report.

    Attributes:
        base_method: Config of the upstream merger, or None for the pool's `_merged_` model.
        shares_processes: Whether several processes of the program share the calibrations.
    """

    base_method: object = None
    shares_processes: ClassVar[bool] = False
    _processes = Processes()

    @property
    def methods(self) -> Mapping[str, Method]:
        """Name of each model in reports -> the method that builds it."""
        raise NotImplementedError

    @property
    def model_to_save(self) -> str:
        """Name of the model that is saved and returned, a key of `methods` or `merged`."""
        return next(iter(self.methods))

    @property
    def references(self) -> Sequence[str]:
        """Reference models to evaluate: some of `base`, `experts` and `merged`."""
        return (MERGED,)

    @property
    def planned_models(self) -> dict[str, int]:
        """Name of each model -> number of times that a run builds it."""
        return dict.fromkeys(self.methods, 1)

    @property
    def is_merger(self) -> bool:
        """True if the only method is a merger."""
        return hasattr(next(iter(self.methods.values())), "merge")

    def facts(self, name: str, result: MethodResult) -> Facts:
        """Return what the report says about the model `name`."""
        return self.methods[name].facts(name, result)

    def on_model_built(
        self, name: str, model: nn.Module, report: SavedReport, inputs: MethodInputs
    ) -> None:
        """Inspect a model before its evaluation. By default nothing is done."""

    def on_run_start(self) -> None:
        """Join other processes. The first one prepares the run."""
        if self.shares_processes:
            self._processes = join_processes(self)
        if self._processes.rank == 0:
            super().on_run_start()

    def inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        """Return the inputs of all methods, with the processes and the upstream merger."""
        inputs = super().inputs(modelpool)
        inputs.processes = self._processes
        inputs.upstream = None if self.is_merger else Upstream(self.base_method, inputs.models)
        return inputs

    def check(self, inputs: MethodInputs) -> None:
        """Refuse settings that do not fit the pools. Nothing is opened."""
        super().check(inputs)
        for method in self.methods.values():
            method.check(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data of all methods, before a merger that may take hours."""
        super().open(inputs)
        folders = [getattr(method, "checkpoint_dir", None) for method in self.methods.values()]
        check_disks(self._program, inputs.models, folders)
        for method in self.methods.values():
            method.open(inputs)

    @isolated_torch_state()
    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge, then build, evaluate and report the model of each method.

        Args:
            modelpool: The pool with the base (`_pretrained_`), the experts, their calibration data
                and, without `base_method`, the `_merged_` model.

        Returns:
            The model `model_to_save`.

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
            merged, method = self._merge(inputs), self.methods.get(self.model_to_save)
            if merged is not None and method is None:
                return merged
            return run_method(method, merged, inputs).model
        model = self._build_and_report(inputs)
        self._processes.gather(None)  # no process ends without error if the first one fails
        return model

    def _build_and_report(self, inputs: MethodInputs) -> nn.Module:
        """Build all models. All processes but the first only take part in the calibrations."""
        processes, upstream = self._processes, inputs.upstream
        merged_name = upstream.name if upstream else next(iter(self.methods))
        report = SavedReport(
            inputs,
            self.log_dir,
            merged_name if self.model_to_save == MERGED else self.model_to_save,
            suite=suite_name(inputs.modelpool),
            merger=merged_name,
            base_method=self.base_method,
        )
        on_model_built = partial(self.on_model_built, report=report, inputs=inputs)
        merged = self._merge(inputs, report)
        merged_facts = Facts(settings=plain_config(self.base_method) or {})
        if merged is not None:
            report.save_if_selected(merged_name, merged, merged_facts)
        is_alone = len(self.methods) == 1 or processes.size > 1
        for name, method in self.methods.items():
            with report.continue_on_error(name, alone=is_alone):
                log.info(method.title(name))
                log.debug("settings of %s: %s", name, method.settings)
                with measure() as cost:
                    result = run_method(method, merged, inputs)
                facts = self.facts(name, result)
                report.save_if_selected(name, result.model, facts)
                on_model_built(name, result.model)
                report.add(name, result.model, facts, cost)
                del result  # frees the model before the next one is built
        processes.doing = "evaluations of references and the report"
        if processes.rank > 0:
            return report.model
        if merged is not None and (MERGED in self.references or report.row == merged_name):
            on_model_built(merged_name, merged)
            report.add(merged_name, merged, merged_facts)
        del merged
        report.add_references(self.references, on_model_built)
        return self.finish(report)

    def finish(self, report: SavedReport) -> nn.Module:
        """Write and show the report, and return the model `model_to_save`."""
        return report.finish()

    def _merge(self, inputs: MethodInputs, report: SavedReport | None = None) -> nn.Module | None:
        """Return the merged model, in every process, or None if the only method is a merger."""
        processes, merged = self._processes, None
        if inputs.upstream is None:
            return None
        processes.doing = "the merging method (method.base_method)"
        if processes.rank == 0:
            if report is not None:
                family = getattr(next(iter(self.methods.values())), "family", None)
                report.warn(check_experts(inputs.models, family))
            merged = inputs.upstream.merged_model(self._program)
        return share_model(merged, processes, self.fabric.device)
