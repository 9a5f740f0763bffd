"""Running the cells of a grid, one model in memory at a time; finished cells stay finished."""

import gc
import logging
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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
from fusion_bench_featcal.lab.compare.cell_process import run_cell
from fusion_bench_featcal.lab.compare.data import DataDigests, test_items_read
from fusion_bench_featcal.lab.compare.fingerprint import (
    FileDigests,
    describe_code,
    describe_makers,
    describe_pool,
    describe_task_pool,
    fingerprint,
)
from fusion_bench_featcal.lab.compare.grid import NONE, Grid, Merger
from fusion_bench_featcal.lab.compare.inference import InferenceTimer, Timed
from fusion_bench_featcal.lab.compare.store import CellResult, ResultStore
from fusion_bench_featcal.lab.rivals.interface import seed_of
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
from fusion_bench_featcal.results.find import FailedCell
from fusion_bench_featcal.results.run_rows import finite_losses
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)


class Conditions:
    """Conditions of all results on a pair of pools, whose files and data are digested once."""

    def __init__(self, inputs: MethodInputs) -> None:
        """Digest the pools' files and test items.

        Args:
            inputs: The pools and the device.

        Raises:
            CalibrationError: If the data of a task cannot be loaded.
        """
        modelpool, taskpool, fabric = inputs.modelpool, inputs.taskpool, inputs.fabric
        self.files, self.data = FileDigests(), DataDigests(modelpool, taskpool)
        self.described = {
            "modelpool": describe_pool(modelpool, self.files),
            "taskpool": describe_task_pool(taskpool, self.files),
            "software": describe_makers(),
            "device": fabric.device.type,
            "precision": str(fabric.strategy.precision.precision),
            "test_items": self.data.tested(),
        }


@dataclass
class GridRun:
    """One pass over a grid."""

    grid: Grid
    inputs: MethodInputs  # that the cells share
    store: ResultStore  # of finished results and merged models
    seed: int  # of each merger and each cell, so that a resumed run equals an uninterrupted one
    program: Any = None  # FusionBench's
    log_dir: Path | None = None  # for the reports that FusionBench's task pools leave
    process_per_cell: bool = False  # references stay in this one
    words: Sequence[str] = ()  # for the command of these processes, beside this one's
    conditions: Conditions | None = None  # of an earlier run with the same inputs
    # (merger, cell) -> result; references have the merger None.
    results: dict[tuple[str | None, str], CellResult] = field(default_factory=dict)
    failed: list[FailedCell] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conditions = conditions = self.conditions or Conditions(self.inputs)
        self._files, self._data = conditions.files, conditions.data
        self._conditions = conditions.described
        inputs = self.inputs
        self._timer = InferenceTimer(inputs.taskpool, inputs.fabric, self._load_like)
        self._not_merged: dict[str, str] = {}  # merger -> reason

    def run(self) -> None:
        """Run what is not finished; a failing cell is noted and does not stop the others."""
        for name in self.grid.references:
            work = self._base if name == BASE else self._experts
            self._cell(None, name, {"reference": name}, work)
        for merger in self.grid.mergers:
            for cell in self.grid.cells_of(merger):
                self._merger_cell(merger, cell)

    def _merger_cell(self, merger: Merger, cell: str) -> None:
        depends = {"merger": self._merger_depends(merger), "method": self._method_depends(cell)}
        own = partial(self._post_merged, merger, cell)
        apart = partial(self._in_a_process, merger, cell) if self.process_per_cell else None
        self._cell(merger.name, cell, depends, own, apart)

    def _merger_depends(self, merger: Merger) -> dict[str, Any]:
        """Everything that a merged model depends on but the run's conditions."""
        config = plain(merger.config)
        code = describe_code(config, self._files)
        return {"config": config, "code": code, "data": self._data.drawn(config)}

    def _method_depends(self, cell: str) -> Any:
        """Everything that a cell depends on but its merged model and the run's conditions."""
        if cell == NONE:
            return NONE
        method, config = self.grid.cells[cell], self.grid.configs[cell]
        kind = type(method)
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            "settings": method.settings,  # with defaults
            "config": config,  # with what the settings leave out
            "code": describe_code([kind, config], self._files),
            "data": self._data.drawn(config, method.settings),
        }

    def _cell(
        self,
        merger: str | None,
        cell: str,
        depends: Any,
        work: Callable[[], CellResult],
        apart: Callable[[str, str], CellResult] | None = None,
    ) -> None:
        """Take a finished result, or make it and keep it; `apart` does so in another process."""
        name = cell if merger is None else f"{merger}--{cell}"
        # References draw nothing.
        key = fingerprint(self._conditions, None if merger is None else self.seed, depends)
        position = f"{len(self.results) + len(self.failed) + 1} of {len(self.grid)}: {name}"
        result = self.store.result(name, key)
        if result is not None:
            log.info("cell %s is finished", position)
        else:
            log.info("cell %s", position)
            lightning.seed_everything(self.seed, verbose=False)
            try:
                if apart is None:
                    result = work()
                    self.store.keep_result(name, key, result)
                else:
                    result = apart(name, key)
            # Whatever a method or merger raises, the other cells are worth having.
            except Exception as error:
                # A CalibrationError says all there is to say; where others came from must be seen.
                trace = not isinstance(error, CalibrationError)
                log.error("cell %s failed: %s", name, error, exc_info=trace)
                reason = _reason(error)
                self.failed.append(
                    FailedCell(upstream=merger, name=cell, reason=reason, seed=self.seed)
                )
                return
            finally:
                gc.collect()  # lets go of models in reference cycles before the next is loaded
        self.results[merger, cell] = result

    def _in_a_process(self, merger: Merger, cell: str, name: str, key: str) -> CellResult:
        """Run a cell in a process of its own, and take the result that it has kept."""
        self._refuse_not_merged(merger)
        folder = self.store.folder
        said = run_cell(merger.name, cell, alone=merger.alone, results_dir=folder, words=self.words)
        result = self.store.result(name, key)
        if result is None:
            if cell == NONE:  # the others would try to merge again
                self._not_merged[merger.name] = said
            raise CalibrationError(said)
        return result

    def _refuse_not_merged(self, merger: Merger) -> None:
        if merger.name in self._not_merged:
            raise CalibrationError(f"not merged: {self._not_merged[merger.name]}")

    def _base(self) -> CellResult:
        model = load_pool_model(self.inputs.modelpool, BASE_MODEL)
        evaluation = self._evaluate(BASE, model)
        return _result(evaluation, cost=_inference([self._timer.time(model)]))

    def _experts(self) -> CellResult:
        """Each expert on its own task."""
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

    def _post_merged(self, merger: Merger, cell: str) -> CellResult:
        merged, merging = self._merged(merger)
        if cell == NONE:
            settings, pool = plain(merger.config), self.inputs.modelpool
            result = _result(self._evaluate(merger.name, merged), settings=settings)
            result.cost = {**merging, **self._deployed(merged, {})}
            if "samples_per_task" in settings:  # a merger whose config is in FeatCal's words
                split = str(settings.get("calibration_split", "train"))
                number = settings["samples_per_task"]
                result.samples = samples_used(pool, pool.model_names, number, split)
            elif test_items_read(settings):
                result.samples = samples_used(pool, pool.model_names, sys.maxsize, "test")
            return result
        method = self.grid.cells[cell]
        with measure() as cost:
            model = method.post_merge(merged, self.inputs)
        del merged
        result = _result(self._evaluate(f"{merger.name}+{cell}", model), settings=method.settings)
        result.cost = {**cost.as_dict(), **self._deployed(model, method.added(model))}
        if isinstance(merging.get("seconds"), float):
            result.cost[TOTAL_SECONDS] = merging["seconds"] + cost.seconds
        result.samples = method.samples(model, list(result.accuracy))
        result.cost |= _choice(model)
        merged_result = self.results.get((merger.name, NONE))
        if merged_result is not None:
            result.cost |= unseen_accuracy(getattr(model, "seen", {}), result, merged_result)
        result.curves = as_curves(getattr(model, "curves", {}), "the model's curves")
        return result

    def _merged(self, merger: Merger) -> tuple[nn.Module, dict[str, Any]]:
        """The merged model and what merging cost; merged once, then from disk."""
        self._refuse_not_merged(merger)
        key = fingerprint(self._conditions, self.seed, self._merger_depends(merger))
        stored = self.store.model(merger.name, key, self._load_like)
        if stored is None:
            model, cost = self._merge(merger)
            if not self.store.keep_model(merger.name, key, model, cost):
                return model, cost
            del model
            stored = self.store.model(merger.name, key, self._load_like)
        if stored is None:
            raise CalibrationError(
                f"the model that {merger.name} made was kept in {self.store.folder}, but cannot be "
                "read again. Set method.results_dir to a folder on another disk"
            )
        return stored

    def _merge(self, merger: Merger) -> tuple[nn.Module, dict[str, Any]]:
        config = OmegaConf.create(merger.config)
        try:
            with measure() as cost:
                model = run_merger(self.program, config, self.inputs.modelpool, merger.setting)
        except Exception as error:
            self._not_merged[merger.name] = _reason(error)
            raise
        return model, cost.as_dict() | _choice(model)

    def _load_like(self) -> nn.Module:
        """A model of the class that mergers make, whose weights may be replaced."""
        pool = self.inputs.modelpool
        model = load_pool_model(pool, BASE_MODEL if pool.has_pretrained else pool.model_names[0])
        # Models that a pool holds in memory are needed again.
        return copied_module(model) if pool.has_instance_models else model

    def _deployed(self, model: nn.Module, added: Mapping[str, int]) -> dict[str, Any]:
        """Costs of an evaluated model at inference."""
        return {
            # FusionBench's protocol: a surgery model is told the task with every batch.
            TASK_ID: "yes" if getattr(model, "is_surgery_model", False) else "no",
            MODULES_ADDED: len(added),
            PARAMETERS_ADDED: sum(added.values()),
            **_inference([self._timer.time(model)]),
        }

    def _evaluate(self, name: str, model: nn.Module, tasks: list[str] | None = None) -> Evaluation:
        taskpool = self.inputs.taskpool
        return evaluate(taskpool, model, name=name, tasks=tasks, log_dir=self.log_dir)


def _reason(error: Exception) -> str:
    return str(error).strip() or type(error).__name__


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
    """Entries on the choice of the settings that made a model, where several were compared."""
    choice: Any = getattr(model, "choice", None)
    return {} if choice is None else {SETTINGS_TRIED: choice.tried, CHOSEN: choice.chosen}


def unseen_accuracy(
    seen: Mapping[str, tuple[Sequence[int], int]], result: CellResult, merged: CellResult
) -> dict[str, Any]:
    """Accuracy on the test items that a model was not fitted on.

    Args:
        seen: Task -> positions of those it was fitted on, and the number of all.
        result: The model's results.
        merged: Those of the merged model.

    Returns:
        The average over tasks that have such items, its gain over the merged model on the same
        items, and the number of these tasks; nothing for models that were fitted on other data, and
        where the task pool's items are not the model pool's.
    """
    averages = []
    for task, (positions, available) in seen.items():
        own, other = ((each.correct or {}).get(task) for each in (result, merged))
        if own is None or other is None or not len(own) == len(other) == available:
            return {}
        left = np.setdiff1d(np.arange(available), positions)
        if len(left):
            averages.append([float(np.asarray(flags)[left].mean()) for flags in (own, other)])
    if not averages:
        return {UNSEEN_TASKS: 0} if seen else {}
    own, other = np.mean(averages, axis=0)
    return {UNSEEN: float(own), UNSEEN_GAIN: float(own - other), UNSEEN_TASKS: len(averages)}


def _inference(times: Sequence[Timed | None]) -> dict[str, Any]:
    """Means over models; a model that could not be timed leaves it open for all."""
    known = [timed for timed in times if timed is not None]
    if not known or len(known) < len(times):
        return {SECONDS_PER_SAMPLE: UNAVAILABLE}
    entries = {SECONDS_PER_SAMPLE: statistics.fmean(timed.seconds for timed in known)}
    ratios = [timed.relative for timed in known if timed.relative is not None]
    if len(ratios) == len(known):
        entries[RELATIVE_SECONDS] = statistics.fmean(ratios)
    return entries
