"""`method=compare`: rows over upstream mergers on one model pool, in one table.

A finished cell is a file in `results_dir` and is not run again. Samples, seeds and other values are
settings, so a study is Hydra's own sweep, whose jobs fill one folder:

    fusion_bench -m method=compare method.samples_per_task=8,64,256 method.seed=1,2,3
"""

import copy
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from omegaconf import DictConfig, open_dict

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context, message_of
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.fusionbench.method import DeclaredMethod
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_checks import check_experts
from fusion_bench_featcal.fusionbench.report import suite_name
from fusion_bench_featcal.fusionbench.rows import Method
from fusion_bench_featcal.fusionbench.run_settings import pool_defaults
from fusion_bench_featcal.lab.compare.cells import RESULTS_DIR, CellRunner, reason_of
from fusion_bench_featcal.lab.compare.grid import NONE, Cell, cells_of
from fusion_bench_featcal.lab.compare.settings import ComparisonSettings
from fusion_bench_featcal.results import Note, Run, accuracy_frame, prepare_directory, write_run
from fusion_bench_featcal.results.notes import FAILED, NOTE
from fusion_bench_featcal.results.remarks import closing_lines_of_a_comparison
from fusion_bench_featcal.results.show import show
from fusion_bench_featcal.run.devices import usual_torch

log = logging.getLogger(__name__)


class ComparisonAlgorithm(DeclaredMethod):
    """Compares post-merging methods over upstream mergers.

    Run by `fusion_bench method=compare modelpool=...`.
    """

    name = "compare"
    setting_kinds = (ComparisonSettings,)

    def __init__(self, **keys: object) -> None:
        """Store the settings. `run` checks the names, together with those of the model pool.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.settings: ComparisonSettings = self.declared[0]

    @property
    def planned_rows(self) -> dict[str, int]:
        """Row of a comparison -> the number of mergers on which it runs."""
        return dict(Counter(cell.row for cell in self.cells))

    @usual_torch()
    def run(self, modelpool: BaseModelPool) -> None:  # type: ignore[override]
        """Run all cells that are not finished, report them, and return no model.

        Raises:
            ValueError: If names or settings are wrong, before anything is loaded.
            CalibrationError: If the pools do not fit or, after all reports, if cells failed.
        """
        settings, suite, cells = self.settings, suite_name(modelpool), self.cells
        inputs = self.inputs(modelpool)
        self.check(inputs)
        self.open(inputs)
        check_experts(inputs.models)
        _, tasks, label = _part(modelpool, settings.tasks)
        results_dir = settings.results_dir or Path("outputs") / "comparison" / suite
        store = prepare_directory(results_dir, RESULTS_DIR)
        folder = (store / "table") if self.log_dir is None else Path(self.log_dir)
        done = _run_cells(CellRunner(inputs, settings, suite, tasks, label, store), cells)
        self._report(folder, store, done)
        failed = [note for note in done.notes if note.kind == FAILED]
        if failed:
            reasons = (f"{note.merger or 'reference'}, {note.row}: {note.text}" for note in failed)
            raise CalibrationError(
                f"{len(failed)} of {pluralize(len(cells), 'cell')} failed; the others are finished "
                f"and stay so when the command is repeated. {'; '.join(reasons)}"
            )

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells. Raises as `grid.cells_of`."""
        return cells_of(self.settings, pool_defaults(self._program))

    def inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        """Return the inputs that all cells share: the chosen tasks of the pool."""
        return super().inputs(_part(modelpool, self.settings.tasks)[0])

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a run without a task pool or with a model to save, and names that do not fit."""
        if inputs.taskpool is None:
            raise CalibrationError(
                "compare needs a task pool to evaluate on: the model pool brings none "
                "(default_taskpool), or taskpool=dummy was asked for. Name one, for example "
                "taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8"
            )
        if getattr(self._program, "merged_model_save_path", None) is not None:
            raise CalibrationError(
                "compare returns no model to save: leave merged_model_save_path out, and run "
                "the method that you choose by itself"
            )
        methods = self._methods
        super().check(inputs)
        for place, method in methods:
            with error_context(place, cause=message_of(ValueError)):
                method.check(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data of all methods."""
        super().open(inputs)
        for place, method in self._methods:
            with error_context(place, cause=message_of(ValueError)):
                method.open(inputs)

    @property
    def _methods(self) -> list[tuple[str, Method]]:
        """The setting of each method with its object: of mergers with data, then of rows."""
        mergers = {cell.merger.name: cell.merger for cell in self.cells if cell.merger}
        rows = {cell.row: cell.method for cell in self.cells if cell.method}
        return [
            *((merger.setting, row) for merger in mergers.values() for row in merger.methods),
            *((f"method.post_merging_methods.{name}", method) for name, method in rows.items()),
        ]

    def _report(self, folder: Path, store: Path, done: Run) -> None:
        """Write this command's cells as one run, and show their table at the end."""
        notes = self.settings.notes or {}
        names = (row.name for row in done.rows if row.name in notes)
        done.note(*(Note(NOTE, notes[name], name) for name in dict.fromkeys(names)))
        if done.rows:
            frame = accuracy_frame(done)
            write_run(folder, done, frame=frame)
            if frame.lines:
                show(frame)
            print("\n".join(closing_lines_of_a_comparison(folder, store)))


def _run_cells(runner: CellRunner, cells: Sequence[Cell]) -> Run:
    """Run the cells merger by merger. One that fails becomes a note, and the others go on."""
    done = Run(suite=runner.suite)
    for number, cell in enumerate(cells, 1):
        log.info("%d of %d: %s", number, len(cells), cell.title)
        try:
            cell_run = runner.run(cell)
        except Exception as error:  # methods and mergers raise any type
            is_expected = isinstance(error, CalibrationError)
            log.error("%s failed: %s", cell.title, error, exc_info=not is_expected)
            merger = cell.merger.name if cell.merger else ""
            row = cell.row if cell.method or not merger else NONE
            done.note(Note(FAILED, reason_of(error), row, merger=merger))
            continue
        done.rows += cell_run.rows
        done.lines += cell_run.more_lines()
        done.notes += [note for note in cell_run.notes if note not in done.notes]
        done.versions, done.device = cell_run.versions, cell_run.device
    return done


def _part(
    modelpool: BaseModelPool, tasks: Any
) -> tuple[BaseModelPool, list[str] | None, int | str]:
    """Return the pool with the models of some tasks, these tasks, and their label in reports.

    Raises:
        ValueError: If the pool has no such tasks.
    """
    names = list(modelpool.model_names)
    if tasks is None:
        return modelpool, None, len(names)
    if isinstance(tasks, int) and tasks > len(names):
        raise ValueError(f"method.tasks={tasks}, but the pool has {pluralize(len(names), 'task')}")
    chosen = names[:tasks] if isinstance(tasks, int) else list(tasks)
    refuse_unknown(chosen, names, "method.tasks: ")
    part, models = copy.copy(modelpool), modelpool._models.copy()
    with open_dict(models) if isinstance(models, DictConfig) else nullcontext():
        for name in set(names) - set(chosen):
            del models[name]
    part._models = models
    is_prefix = chosen == names[: len(chosen)]
    return part, chosen, len(chosen) if is_prefix else ", ".join(part.model_names)
