"""`method=compare`: mergers and post-merging methods on one model pool, in one table.

A finished cell has a folder in `results_dir` and does not run again. Samples, seeds and other
values are settings, so a study is a sweep of Hydra, whose jobs fill one folder:

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
from fusion_bench_featcal.fusionbench.configured_algorithm import ConfiguredAlgorithm
from fusion_bench_featcal.fusionbench.method import Method
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_checks import check_experts
from fusion_bench_featcal.fusionbench.report import suite_name
from fusion_bench_featcal.fusionbench.run_settings import pool_defaults
from fusion_bench_featcal.lab.compare.cells import RESULTS_DIR, CellRunner, reason_of
from fusion_bench_featcal.lab.compare.grid import NONE, Cell, cells_of
from fusion_bench_featcal.lab.compare.settings import ComparisonSettings
from fusion_bench_featcal.results import Note, Run, accuracy_frame, prepare_directory, write_run
from fusion_bench_featcal.results.notes import FAILED, NOTE
from fusion_bench_featcal.results.remarks import closing_lines_of_a_comparison
from fusion_bench_featcal.results.show import show
from fusion_bench_featcal.run.devices import isolated_torch_state

log = logging.getLogger(__name__)


class ComparisonAlgorithm(ConfiguredAlgorithm):
    """Compares post-merging methods over upstream mergers.

    Run by `fusion_bench method=compare modelpool=...`.
    """

    name = "compare"
    settings_classes = (ComparisonSettings,)

    def __init__(self, **keys: object) -> None:
        """Store the settings. `cells` checks the names of mergers, methods and references.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.settings: ComparisonSettings = self.settings_objects[0]

    @property
    def planned_models(self) -> dict[str, int]:
        """Name of each model -> number of upstream mergers with which it is built."""
        return dict(Counter(cell.name for cell in self.cells))

    @isolated_torch_state()
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
        chosen = _chosen_tasks(modelpool, settings.tasks)
        is_prefix = chosen == list(modelpool.model_names)[: len(chosen)]
        label = len(chosen) if is_prefix else ", ".join(inputs.modelpool.model_names)
        tasks = None if settings.tasks is None else chosen
        results_dir = settings.results_dir or Path("outputs") / "comparison" / suite
        store = prepare_directory(results_dir, RESULTS_DIR)
        folder = (store / "table") if self.log_dir is None else Path(self.log_dir)
        done = _run_cells(CellRunner(inputs, settings, suite, tasks, label, store), cells)
        self._report(folder, store, done)
        failed = [note for note in done.notes if note.kind == FAILED]
        if failed:
            reasons = (f"{note.merger or 'reference'}, {note.row}: {note.text}" for note in failed)
            raise CalibrationError(
                f"{len(failed)} of {pluralize(len(cells), 'run')} failed. The others are finished "
                f"and do not run again if you repeat the command. {'; '.join(reasons)}"
            )

    @cached_property
    def cells(self) -> list[Cell]:
        """All cells. Raises as `grid.cells_of`."""
        return cells_of(self.settings, pool_defaults(self._program))

    def inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        """Return the inputs that all cells share. Their pool has only the chosen tasks."""
        if self.settings.tasks is None:
            return super().inputs(modelpool)
        chosen = _chosen_tasks(modelpool, self.settings.tasks)
        pool, models = copy.copy(modelpool), modelpool._models.copy()
        with open_dict(models) if isinstance(models, DictConfig) else nullcontext():
            for name in set(modelpool.model_names) - set(chosen):
                del models[name]
        pool._models = models
        return super().inputs(pool)

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a run without a task pool or with a model to save, and names that do not fit."""
        if inputs.taskpool is None:
            raise CalibrationError(
                "compare needs a task pool to evaluate on, but the model pool has none "
                "(default_taskpool), or taskpool=dummy was set. Name one, for example "
                "taskpool=CLIPVisionModelTaskPool/clip-vit-classification_TA8"
            )
        if getattr(self._program, "merged_model_save_path", None) is not None:
            raise CalibrationError(
                "compare saves no model: leave merged_model_save_path out, and run the method that "
                "you choose on its own"
            )
        methods = self._methods
        super().check(inputs)
        for setting, method in methods:
            with error_context(setting, cause=message_of(ValueError)):
                method.check(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data of all methods."""
        super().open(inputs)
        for setting, method in self._methods:
            with error_context(setting, cause=message_of(ValueError)):
                method.open(inputs)
        used = {id(cell.method) for cell in self.cells}
        for key in inputs.opened_batches.keys() - used:  # of mergers, which FusionBench makes anew
            del inputs.opened_batches[key]

    @property
    def _methods(self) -> list[tuple[str, Method]]:
        """Each method with its setting: first mergers that are ours, then post-merging methods.

        The objects of mergers are new, as FusionBench makes others for the run.
        """
        mergers = {cell.merger.name: cell.merger for cell in self.cells if cell.merger}
        methods = {cell.name: cell.method for cell in self.cells if cell.method}
        return [
            *((merger.setting, method) for merger in mergers.values() for method in merger.methods),
            *((f"method.post_merging_methods.{name}", methods[name]) for name in methods),
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
    """Run the cells merger by merger. A cell that fails becomes a note, and the others go on."""
    done = Run(suite=runner.suite)
    for number, cell in enumerate(cells, 1):
        log.info("%d of %d: %s", number, len(cells), cell.title)
        try:
            cell_run = runner.run(cell)
        except Exception as error:  # methods and mergers raise any type
            is_expected = isinstance(error, CalibrationError)
            log.error("%s failed: %s", cell.title, error, exc_info=not is_expected)
            merger = cell.merger.name if cell.merger else ""
            row = cell.name if cell.method or not merger else NONE
            done.note(Note(FAILED, reason_of(error), row, merger=merger))
            continue
        done.rows += cell_run.rows
        done.lines += cell_run.more_lines()
        done.notes += [note for note in cell_run.notes if note not in done.notes]
        done.versions, done.device = cell_run.versions, cell_run.device
    return done


def _chosen_tasks(modelpool: BaseModelPool, tasks: Any) -> list[str]:
    """Return the tasks that the setting `tasks` chooses.

    Raises:
        ValueError: If the pool has no such tasks.
    """
    names = list(modelpool.model_names)
    if tasks is None:
        return names
    if isinstance(tasks, int) and tasks > len(names):
        raise ValueError(f"method.tasks={tasks}, but the pool has {pluralize(len(names), 'task')}")
    chosen = names[:tasks] if isinstance(tasks, int) else list(tasks)
    refuse_unknown(chosen, names, "method.tasks: ")
    return chosen
