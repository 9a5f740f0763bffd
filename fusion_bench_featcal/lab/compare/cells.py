"""One cell of a grid: builds, evaluates and times its model, and stores the result."""

import gc
import logging
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import numpy as np
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.fusionbench.evaluation import Evaluation, evaluate, join, task_names
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.lab.compare.claims import Busy, claimed
from fusion_bench_featcal.lab.compare.data import test_items_read
from fusion_bench_featcal.lab.compare.grid import NONE, Merger
from fusion_bench_featcal.lab.compare.inference import InferenceTimer, Timed
from fusion_bench_featcal.lab.compare.keys import Cell
from fusion_bench_featcal.lab.compare.store import CellResult, ResultStore
from fusion_bench_featcal.lab.rivals.interface import PostMerging, seed_of
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.results import BASE, UNAVAILABLE, measure
from fusion_bench_featcal.results.cost import (
    CHOSEN,
    MODULES_ADDED,
    PARAMETERS_ADDED,
    RELATIVE_SECONDS,
    SECONDS_PER_SAMPLE,
    SETTINGS_TRIED,
    TASK_ID,
    TOTAL_SECONDS,
    UNSEEN,
    UNSEEN_GAIN,
    UNSEEN_TASKS,
)
from fusion_bench_featcal.results.curves import as_curves
from fusion_bench_featcal.results.run_rows import finite_losses
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Failure:
    """A cell without a result. `trace` is empty if the reason is sufficient."""

    reason: str
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Return the failure for an exception."""
        is_expected = isinstance(error, CalibrationError)
        trace = "" if is_expected else "".join(traceback.format_exception(error))
        return cls(str(error).strip() or type(error).__name__, trace)


Outcome = CellResult | Failure | None
"""A cell's result or failure, or None while another process is running it."""


@dataclass
class CellMaker:
    """Runs cells of a grid, with one model in memory at a time.

    Attributes:
        methods: Post-merging methods by name.
        inputs: The pools and the device.
        store: Finished results and merged models.
        seed: Seed of each merger and each cell, so that cells are independent of one another.
        program: FusionBench's program.
        log_dir: Folder for the reports of FusionBench's task pools.
    """

    methods: Mapping[str, PostMerging]
    inputs: MethodInputs
    store: ResultStore
    seed: int
    program: Any = None
    log_dir: Path | None = None

    def __post_init__(self) -> None:
        inputs = self.inputs
        self._timer = InferenceTimer(inputs.taskpool, inputs.fabric, self._load_like)

    def run(self, cell: Cell, run: str) -> Outcome:
        """Return the stored result of a cell, or run it and store the result.

        Args:
            cell: The cell.
            run: Name of the driver's run, for the claim.
        """
        try:
            with claimed(self.store.claim(cell.title, cell.key), run):
                result = self.store.result(cell.title, cell.key)
                if result is not None:
                    log.info("cell %s is finished", cell.title)
                    return result
                lightning.seed_everything(self.seed, verbose=False)
                result = self._run_cell(cell)
                self.store.keep_result(cell.title, cell.key, result)
                return result
        except Busy:
            return None
        # If a method or merger raises, the other cells continue.
        except Exception as error:
            return Failure.of(error)
        finally:
            gc.collect()  # frees models in reference cycles before the next one is loaded

    def _run_cell(self, cell: Cell) -> CellResult:
        # Mergers and checks may ask the program for its pools.
        if self.program is not None:
            self.program.modelpool = self.inputs.modelpool
            self.program.taskpool = self.inputs.taskpool
        if cell.merger is None:
            return self._base() if cell.name == BASE else self._experts()
        if cell.name == NONE:
            return self._merger_result(cell.merger, cell)
        return self._post_merged(cell.merger, cell)

    def _base(self) -> CellResult:
        model = load_pool_model(self.inputs.modelpool, BASE_MODEL)
        evaluation = self._evaluate(BASE, model)
        return _result(evaluation, cost=_inference([self._timer.time(model)]))

    def _experts(self) -> CellResult:
        """Return the result of the experts, each on its task."""
        pool = self.inputs.modelpool
        tasks = task_names(self.inputs.taskpool) or pool.model_names
        without = [task for task in tasks if task not in pool.model_names]
        if without:
            raise CalibrationError(
                f"the model pool has no expert for the tasks {without}: set "
                f"modelpool.models.{without[0]}, or leave experts out of method.references"
            )
        evaluations, times = [], []
        for task in tasks:
            model = load_pool_model(pool, task)
            evaluations.append(self._evaluate(task, model, [task]))
            times.append(self._timer.time(model))
            del model
        return _result(join(evaluations), cost=_inference(times))

    def _merger_result(self, merger: Merger, cell: Cell) -> CellResult:
        merged, merging = self._merged(merger, cell.model_key)
        settings, pool = plain(merger.config), self.inputs.modelpool
        result = _result(self._evaluate(merger.name, merged), settings=settings)
        result.cost = {**merging, **self._deployed(merged, {})}
        if "samples_per_task" in settings:  # a merger with FeatCal's settings
            split = str(settings.get("calibration_split", "train"))
            number = settings["samples_per_task"]
            result.samples = samples_used(pool, pool.model_names, number, split)
        elif test_items_read(settings):
            result.samples = samples_used(pool, pool.model_names, sys.maxsize, "test")
        return result

    def _post_merged(self, merger: Merger, cell: Cell) -> CellResult:
        merged, merging = self._merged(merger, cell.model_key)
        method, name = self.methods[cell.name], f"{merger.name}+{cell.name}"
        with measure() as cost:
            model = method.post_merge(merged, self.inputs)
        del merged
        result = _result(self._evaluate(name, model), settings=method.settings)
        result.cost = {**cost.as_dict(), **self._deployed(model, method.added(model))}
        if isinstance(merging.get("seconds"), float):
            result.cost[TOTAL_SECONDS] = merging["seconds"] + cost.seconds
        result.samples = method.samples(model, list(result.accuracy))
        result.cost |= _choice(model)
        fitted_items = getattr(model, "fitted_items", {})
        title = f"{merger.name}--{NONE}"
        merged_result = self.store.result(title, cell.merged_key) if fitted_items else None
        if merged_result is not None:
            result.cost |= unseen_accuracy(fitted_items, result, merged_result)
        result.curves = as_curves(getattr(model, "curves", {}), "the model's curves")
        return result

    def _merged(self, merger: Merger, key: str) -> tuple[nn.Module, dict[str, Any]]:
        """Return the merged model and its cost. It is merged once, then read from disk."""
        stored = self.store.model(merger.name, key, self._load_like)
        if stored is None:
            config = OmegaConf.create(merger.config)
            with measure() as cost:
                model = run_merger(self.program, config, self.inputs.modelpool, merger.setting)
            costs = cost.as_dict() | _choice(model)
            if not self.store.keep_model(merger.name, key, model, costs):
                return model, costs
            del model
            stored = self.store.model(merger.name, key, self._load_like)
        if stored is None:
            raise CalibrationError(
                f"the model that {merger.name} made was kept in {self.store.folder}, but cannot be "
                "read again. Set method.results_dir to a folder on another disk"
            )
        return stored

    def _load_like(self) -> nn.Module:
        """Return a model of the class that mergers return, for replacing its weights."""
        pool = self.inputs.modelpool
        model = load_pool_model(pool, BASE_MODEL if pool.has_pretrained else pool.model_names[0])
        # The pool's models in memory are needed again.
        return copied_module(model) if pool.has_instance_models else model

    def _deployed(self, model: nn.Module, added: Mapping[str, int]) -> dict[str, Any]:
        """Return costs of an evaluated model at inference."""
        return {
            # In FusionBench's protocol a surgery model receives the task with every batch.
            TASK_ID: "yes" if getattr(model, "is_surgery_model", False) else "no",
            MODULES_ADDED: len(added),
            PARAMETERS_ADDED: sum(added.values()),
            **_inference([self._timer.time(model)]),
        }

    def _evaluate(self, name: str, model: nn.Module, tasks: list[str] | None = None) -> Evaluation:
        taskpool = self.inputs.taskpool
        return evaluate(taskpool, model, name=name, tasks=tasks, log_dir=self.log_dir)


def _result(
    evaluation: Evaluation,
    *,
    settings: dict[str, Any] | None = None,
    cost: dict[str, Any] | None = None,
) -> CellResult:
    finite, infinite = finite_losses(evaluation.loss)
    return CellResult(
        accuracy=evaluation.accuracy,
        loss=finite,
        notes=list(infinite.values()),
        correct=evaluation.correct,
        settings=settings or {},
        seed=seed_of(settings or {}),
        cost=cost or {},
    )


def _choice(model: nn.Module) -> dict[str, Any]:
    """Return entries on the choice of a model's settings, if several were compared."""
    choice: Any = getattr(model, "choice", None)
    return {} if choice is None else {SETTINGS_TRIED: choice.tried, CHOSEN: choice.chosen}


def unseen_accuracy(
    fitted_items: Mapping[str, tuple[Sequence[int], int]], result: CellResult, merged: CellResult
) -> dict[str, Any]:
    """Return the accuracy on test items that a model was not fitted on.

    Args:
        fitted_items: Task -> positions of the items it was fitted on, and the number of all items.
        result: The model's results.
        merged: The merged model's results.

    Returns:
        The average over tasks that have such items, its gain over the merged model on the same
        items, and the number of these tasks. Empty for models that were fitted on other data, or if
        task pool and model pool have different items.
    """
    averages = []
    for task, (positions, available) in fitted_items.items():
        correct, merged_correct = (
            (cell_result.correct or {}).get(task) for cell_result in (result, merged)
        )
        if (
            correct is None
            or merged_correct is None
            or not len(correct) == len(merged_correct) == available
        ):
            return {}
        unseen = np.setdiff1d(np.arange(available), positions)
        if len(unseen):
            averages.append(
                [float(np.asarray(flags)[unseen].mean()) for flags in (correct, merged_correct)]
            )
    if not averages:
        return {UNSEEN_TASKS: 0} if fitted_items else {}
    correct, merged_correct = np.mean(averages, axis=0)
    return {
        UNSEEN: float(correct),
        UNSEEN_GAIN: float(correct - merged_correct),
        UNSEEN_TASKS: len(averages),
    }


def _inference(times: Sequence[Timed | None]) -> dict[str, Any]:
    """Return means over models, or none if a model could not be timed."""
    measured = [timed for timed in times if timed is not None]
    if not measured or len(measured) < len(times):
        return {SECONDS_PER_SAMPLE: UNAVAILABLE}
    entries = {SECONDS_PER_SAMPLE: statistics.fmean(timed.seconds for timed in measured)}
    ratios = [timed.relative for timed in measured if timed.relative is not None]
    if len(ratios) == len(measured):
        entries[RELATIVE_SECONDS] = statistics.fmean(ratios)
    return entries
