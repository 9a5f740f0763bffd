"""The results of one run: evaluates models as they come, reports them when all are done."""

import atexit
import json
import logging
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool, BaseTaskPool
from torch import nn

from fusion_bench_featcal.calibration import CalibrationResult
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.fusionbench.evaluation import (
    EvaluatedTaskPool,
    Evaluation,
    evaluate,
    join,
    task_names,
)
from fusion_bench_featcal.fusionbench.hydra_job import at_the_end
from fusion_bench_featcal.fusionbench.options import MERGED
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.results import (
    BASE,
    EXPERTS,
    FEATCAL,
    Cost,
    Report,
    describe_device,
    versions,
)
from fusion_bench_featcal.results.remarks import (
    closing_lines,
    tasks_below_merged,
    tasks_with_high_drift,
)
from fusion_bench_featcal.results.report import report_scalars
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


class RunResults:
    """Collects a run's rows; without a task pool it only keeps the calibration logs."""

    def __init__(
        self,
        taskpool: BaseTaskPool | None,
        log_dir: str | None,
        *,
        suite: str,
        upstream: str,
        device: Any,
        linear_kernel: str = "auto",
    ) -> None:
        """Start a report.

        Args:
            taskpool: Evaluates models; None: nothing is evaluated.
            log_dir: The run's folder; None: nothing is written.
            suite: Name of the model pool.
            upstream: Name of the row of the upstream merger.
            device: What the run computes on.
            linear_kernel: The setting of that name, for evaluation too.
        """
        self.taskpool = taskpool
        self._linear_kernel = linear_kernel
        self._log_dir = None if log_dir is None else Path(log_dir)
        self._evaluations: dict[str, Evaluation] = {}
        self.report = Report(
            suite=suite,
            upstream=upstream,
            versions=versions(),
            device=describe_device(device),
        )

    @property
    def upstream(self) -> str:
        """Name of the upstream merger's row."""
        return str(self.report.upstream)

    def add_notes(self, notes: Sequence[str]) -> None:
        """Warn of something at once, and say it in the report."""
        for note in notes:
            log.warning(note)
        self.report.notes += notes

    def add_reference(self, name: str, model: nn.Module, settings: Any = None) -> None:
        """Evaluate a model that was not calibrated; runs that are compared agree in `settings`."""
        evaluation = self._evaluate(name, model)
        if evaluation is not None:
            self._add_row(name, evaluation, settings=settings)

    def add_base_and_experts(self, modelpool: BaseModelPool, references: Sequence[str]) -> None:
        """Load and evaluate base and experts, where `references` ask, one in memory at a time."""
        if BASE in references and modelpool.has_pretrained and self.taskpool is not None:
            self.add_reference(BASE, load_pool_model(modelpool, BASE_MODEL))
        if EXPERTS in references:
            self.add_experts(modelpool)

    def add_experts(self, modelpool: BaseModelPool) -> None:
        """Evaluate each expert on its own task, one in memory at a time."""
        if self.taskpool is None:
            return
        tasks = task_names(self.taskpool) or self.report.tasks or modelpool.model_names
        without = [task for task in tasks if task not in modelpool.model_names]
        if without:
            note = f"no row of experts: the model pool has none for the tasks {without}"
            self.report.notes.append(note)
            return
        log.info("evaluating the experts, each on its own task")
        row = join(
            evaluation
            for task in tasks
            if (evaluation := self._evaluate(task, load_pool_model(modelpool, task), [task]))
        )
        self._add_row(EXPERTS, row)

    def add_calibrated(
        self,
        name: str,
        result: CalibrationResult,
        settings: FeatCalSettings,
        cost: Cost,
        tasks: Sequence[str],
    ) -> None:
        """Evaluate the model of the row `featcal` or `featcal:<preset>`, and keep its log."""
        if self._log_dir is not None:
            preset = name.removeprefix(FEATCAL).replace(":", ".")
            result.log.write(self._log_dir / f"calibration_log{preset}.jsonl")
            manifest = json.dumps(result.reads, indent=1) + "\n"
            write_atomic(self._log_dir / f"reads{preset}.json", manifest, "path.log_dir")
        self.add_notes(tasks_with_high_drift(name, result.log.records))
        split = settings.calibration_split
        counts = {record["task"]: record["samples"] for record in result.log.of_kind("task")}
        self.add_made(
            name,
            result.model,
            settings=settings.of_the_model().as_dict(),
            cost=cost,
            samples={task: {"samples": counts[task], "split": split} for task in tasks},
            seed=settings.seed,
        )

    def add_made(
        self,
        name: str,
        model: nn.Module,
        *,
        settings: Mapping[str, Any],
        cost: Cost,
        samples: Mapping[str, Mapping[str, Any]],
        seed: int | None,
    ) -> None:
        """Evaluate the model that a method made.

        Args:
            name: Its row.
            model: The model.
            settings: What it was made with.
            cost: What that took.
            samples: Task -> {"samples", "split"} really used; empty for what uses no data.
            seed: Of samples and training; None for what draws nothing.
        """
        if any(drawn["split"] == "test" for drawn in samples.values()):
            self.report.notes.append(f"{name} was made with samples of the test split")
        made = {"settings": settings, "cost": cost.as_dict(), "samples": samples}
        if seed is not None:
            self.report.seeds[name] = seed
        evaluation = self._evaluate(name, model)
        if evaluation is None:
            for kept, value in made.items():
                getattr(self.report, kept)[name] = dict(value)
        else:
            self._add_row(name, evaluation, **made)

    def finish(self, program: Any, model: nn.Module, row: str, saved: Path | None) -> None:
        """Write and show the report, and spare FusionBench a second evaluation of the model.

        Args:
            program: The running FusionBench program, or None.
            model: The model that the method returns.
            row: Its row; `merged`: the upstream merger's.
            saved: Folder that it was saved to; None: it was not.
        """
        evaluation = self._evaluations.get(self.upstream if row == MERGED else row)
        self.report.notes += tasks_below_merged(self.report)
        first = [BASE, EXPERTS, self.upstream]  # references are evaluated last and listed first
        for kept in (self.report.rows, self.report.loss, self.report.settings, self.report.items):
            for name in [*(n for n in first if n in kept), *(n for n in kept if n not in first)]:
                kept[name] = kept.pop(name)  # type: ignore[assignment]
        if self._log_dir is not None:
            self.report.write(self._log_dir)
        if self.taskpool is None or evaluation is None:
            log.info("no task pool: the model is not evaluated")
        if program is None:
            return
        show = partial(self._show, row, saved)
        waits = at_the_end(show)
        if self.taskpool is not None and evaluation is not None:
            # Without our Hydra callback the interpreter's end is what comes after all that
            # FusionBench prints. It asks for the evaluation when the model has been saved.
            program.taskpool = EvaluatedTaskPool(
                self.taskpool,
                model,
                evaluation,
                lambda: None if waits else atexit.register(show),
            )

    def _add_row(self, name: str, row: Evaluation, **made: Any) -> None:
        self.report.add_row(name, row.accuracy, correct=row.correct, loss=row.loss, **made)

    def _evaluate(
        self, name: str, model: nn.Module, tasks: Sequence[str] | None = None
    ) -> Evaluation | None:
        if self.taskpool is None:
            return None
        if tasks is None:  # of the experts, each on its own task, there is one line
            log.info("evaluating %s", name)
        evaluation = evaluate(
            self.taskpool,
            model,
            name=name,
            tasks=tasks,
            log_dir=self._log_dir,
            linear_kernel=self._linear_kernel,
        )
        if tasks is None:
            self._evaluations[name] = evaluation
        return evaluation

    def _show(self, row: str, saved: Path | None) -> None:
        """Print the table and the closing lines."""
        if self.report.rows:
            self.report.show()
        for line in closing_lines(self.report, row, saved, self._log_dir):
            print(line)


def method_name(config: Any) -> str:
    """`task_arithmetic` from `fusion_bench.method.TaskArithmeticAlgorithm`, or a legacy `name`."""
    target = str(config.get("_target_") or config.get("name"))
    words = target.rsplit(".", 1)[-1].removesuffix("Algorithm")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", words).lower()


def suite_name(modelpool: BaseModelPool) -> str:
    """The model pool's name on the command line, else its class."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        name = HydraConfig.get().runtime.choices.get("modelpool")
        if name:
            return str(name)
    return type(modelpool).__name__


def log_reports(fabric: Any, reports: Iterable[Report]) -> None:
    """Hand all numbers of one run's reports to Fabric's loggers, if the user chose any."""
    if not fabric.loggers:
        return
    scalars: dict[str, float] = {}
    for report in reports:
        scalars |= report_scalars(report)
    with warnings.catch_warnings():
        # CSVLogger announces that it deletes what is in its folder, which is the run's own; but all
        # that it would delete is its own `metrics.csv`.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        fabric.log_dict(scalars, step=0)
    for logger in fabric.loggers:
        # Some keep what is logged until there is much of it.
        logger.save()
