"""Results of one run: evaluates models when they are added, and reports them at the end."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool, BaseTaskPool
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.files import write_atomic
from fusion_bench_featcal.files.json_files import json_text
from fusion_bench_featcal.fusionbench.evaluation import (
    evaluate,
    join,
    task_names,
)
from fusion_bench_featcal.fusionbench.options import MERGED
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.saving import RowSaver, path_option
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.results import (
    BASE,
    EXPERTS,
    Cost,
    Run,
    describe_device,
    versions,
    write_run,
)
from fusion_bench_featcal.results.notes import FAILED, NOTE, SAMPLES, Note
from fusion_bench_featcal.results.remarks import (
    add_figures,
    closing_lines,
    notes_of_log,
    tasks_below_merged,
)
from fusion_bench_featcal.results.run import (
    calibration_log,
    conditions_of,
    file_suffix,
)
from fusion_bench_featcal.results.show import show_run
from fusion_bench_featcal.rules import BY_NAME, completed, rule_of
from fusion_bench_featcal.run.problem import CalibrationResult
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN, FeatCalSettings

log = logging.getLogger(__name__)


class RunResults:
    """Models of a run: one is saved and returned, all are evaluated and reported.

    Without a program nothing is saved, and without its task pool nothing is evaluated.

    Attributes:
        report: The report.
        saver: Stores the model to return, and the folder that it is saved to.
    """

    def __init__(
        self,
        algorithm: Any,
        modelpool: BaseModelPool,
        processor: Any = None,
        *,
        upstream: str,
        row: str,
    ) -> None:
        """Start a report. `check_save_target` has checked the target before.

        Args:
            algorithm: The running method: its program, log directory and Fabric are used.
            modelpool: The pool.
            processor: The pool's processor or tokenizer.
            upstream: Name of the row of the upstream merger.
            row: The row whose model is saved and returned.
        """
        self._program = algorithm._program
        self._log_dir = None if algorithm.log_dir is None else Path(algorithm.log_dir)
        self.saver = RowSaver(self._program, modelpool, processor, row)
        self.report = Run(
            suite=suite_name(modelpool),
            merger=upstream,
            versions=versions(),
            device=describe_device(algorithm.fabric.device),
        )
        self._modelpool = modelpool
        self._taskpool: BaseTaskPool | None = getattr(self._program, "taskpool", None)
        self._returned_row = upstream if row == MERGED else row
        self._failed: dict[str, Exception] = {}

    def add_notes(self, notes: Sequence[str]) -> None:
        """Warn of something at once, and note it in the report."""
        for text in notes:
            log.warning(text)
            self.report.note(Note(NOTE, text))

    def add_base_and_experts(self, references: Sequence[str]) -> None:
        """Load and evaluate the base and experts named in `references`, one at a time."""
        if self._taskpool is None:
            return
        if BASE in references and self._modelpool.has_pretrained:
            self.add_row(BASE, load_pool_model(self._modelpool, BASE_MODEL))
        experts = self._modelpool.model_names if EXPERTS in references else []
        tasks = task_names(self._taskpool) or self.report.tasks or list(experts)
        if missing := [task for task in tasks if experts and task not in experts]:
            note = f"no row of experts: the model pool has none for {', '.join(missing)}"
            self.report.note(Note(NOTE, note))
        elif experts:
            log.info("evaluating experts, each on its own task")
            pool, taskpool = self._modelpool, self._taskpool
            row = join(evaluate(taskpool, load_pool_model(pool, t), [t]) for t in tasks)
            self.report.add_row(EXPERTS, row.scores, correct=row.correct)

    @contextmanager
    def surviving(self, name: str, *, alone: bool) -> Iterator[None]:
        """Context of one row, whose failure becomes a note, so that the other rows are reported.

        Args:
            name: The row.
            alone: Whether a failure ends the run, because there is no other row, or because
                several processes would wait for each other.
        """
        try:
            yield
        except Exception as error:  # of the calibration, the task pool, the disk or a user's rule
            if alone:
                raise
            is_expected = isinstance(error, CalibrationError | ValueError)
            log.error("%s failed: %s", name, first_line(error), exc_info=not is_expected)
            self.report.note(Note(FAILED, first_line(error), name))
            self._failed[name] = error

    def add_calibrated(
        self,
        name: str,
        settings: FeatCalSettings,
        base_method: Any,
        result: CalibrationResult,
        cost: Cost,
    ) -> None:
        """Save and evaluate the model of row `featcal` or `featcal_<preset>`, and keep its log."""
        if self._log_dir is not None:
            result.log.write(self._log_dir / calibration_log(name))
            write_atomic(self._log_dir / f"reads{file_suffix(name)}.json", json_text(result.reads))
        if not (isinstance(settings.rule, str) and settings.rule in BY_NAME):
            self.report.note(Note(NOTE, f"solved by the rule {rule_of(settings)!r}", name))
        # These notes also close the run's output, so no warning is printed here.
        self.report.note(*notes_of_log(name, result.log.records))
        settings = completed(settings)
        values, split = settings.of_the_model().as_dict(), settings.calibration_split
        of_model = {key: values[key] for key in values if key not in SETTINGS_OF_THE_RUN}
        counts = {record["task"]: record["samples"] for record in result.log.of_kind("task")}
        samples = {task: {"samples": count, "split": split} for task, count in counts.items()}
        facts = CardFacts(name, base_method, of_model, counts)
        details: Any = {"cost": cost, "samples": samples, "seed": settings.seed}
        self.saver.offer(result.model, facts)
        self.add_row(name, result.model, settings=of_model, **details)
        add_figures(self.report, self.report.row(name), result.log.records)

    def add_row(
        self,
        name: str,
        model: nn.Module,
        *,
        settings: Any = None,
        cost: Cost | None = None,
        samples: Mapping[str, Mapping[str, Any]] | None = None,
        seed: int | None = None,
    ) -> None:
        """Evaluate a model and report it. Without a task pool, report only a method's cost.

        Args:
            name: Its row.
            model: The model.
            settings: Settings of the method or merger. Runs in one comparison have equal ones.
            cost: Time and memory of the method, None for references.
            samples: Task -> {"samples", "split"}, empty for methods without data.
            seed: Seed of samples and training, or None for methods without randomness.
        """
        details: dict[str, Any] = {"settings": dict(settings or {}), "seed": seed}
        if any(entry["split"] == "test" for entry in (samples or {}).values()):
            self.report.note(Note(SAMPLES, f"{name} was made with samples of the test split"))
        if cost is not None:
            details |= {"cost": cost.as_dict(), "samples": dict(samples or {})}
        if self._taskpool is None:
            if cost is not None:
                self.report.add_row(name, {}, **details)
            return
        log.info("evaluating %s", name)
        row = evaluate(self._taskpool, model)
        file = path_option(self._program, "report_save_path")
        if name == self._returned_row and file is not None:  # FusionBench's report
            write_atomic(file, json.dumps(row.raw), "report_save_path")
        self.report.add_row(name, row.scores, correct=row.correct, **details)

    def finish(self) -> nn.Module:
        """Write, log and show the report, and return the model of the row to save.

        Raises:
            CalibrationError: If a row failed, after everything else is written and shown.
        """
        if self._failed and not any(row.is_repair for row in self.report.rows):
            raise next(iter(self._failed.values()))
        self.report.note(*tasks_below_merged(self.report.rows))
        self._order_rows()
        self.report.versions |= commits()
        if self._log_dir is not None:
            write_run(self._log_dir, self.report)
        if self._taskpool is None:
            log.info("no task pool: the model is not evaluated")
        self.saver.finish(self.report)
        if self._program is not None:
            self._program.taskpool = None  # FusionBench would evaluate the returned model again
            show_run(self.report)
            saver, rows = self.saver, self.report.rows
            unsaved = [row.name for row in rows if row.is_repair and row.name != saver.row]
            print(*closing_lines(saver.row, saver.folder, self._log_dir, unsaved), sep="\n")
        if self._failed:
            rows = "; ".join(f"{row} ({first_line(error)})" for row, error in self._failed.items())
            raise CalibrationError(f"failed: {rows}. The other rows are finished")
        return self.saver.model

    def _order_rows(self) -> None:
        """Put references first, which are evaluated last, and pair rows with their merged model."""
        rows, merger = self.report.rows, self.report.merger
        first = [BASE, EXPERTS, merger]
        rows.sort(key=lambda row: first.index(row.name) if row.name in first else len(first))
        seeds = [row.seed for row in rows if row.seed is not None]
        for merged in (row for row in rows if row.name == merger):
            merged.seed = seeds[0] if merged.seed is None and seeds else merged.seed
            for row in (row for row in rows if row.is_repair):
                row.conditions |= conditions_of(merger, merged.settings, row.settings)


def suite_name(modelpool: BaseModelPool) -> str:
    """Return the model pool's name on the command line, else its class."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized():
        name = HydraConfig.get().runtime.choices.get("modelpool")
        if name:
            return str(name)
    return type(modelpool).__name__
