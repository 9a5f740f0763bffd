"""Cells of a comparison: built, evaluated and timed, or read from their files."""

import contextlib
import gc
import inspect
import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.calibration_data import samples_used
from fusion_bench_featcal.digests import digest_text
from fusion_bench_featcal.fusionbench.evaluation import Evaluation, evaluate, join, task_names
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.hub_files import commits
from fusion_bench_featcal.lab.compare.grid import Cell, Merger
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.module_copies import copied_module
from fusion_bench_featcal.results import BASE, ReportError, describe_device, measure, versions
from fusion_bench_featcal.results.cells import SUFFIX, CellResult, load_cell, save_cell
from fusion_bench_featcal.results.cost import (
    MODULES_ADDED,
    PARAMETERS_ADDED,
    TASK_ID,
    TOTAL_SECONDS,
)
from fusion_bench_featcal.results.curves import as_curves
from fusion_bench_featcal.results.run_rows import finite_losses
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

_PACKAGES = ("fusion-bench", "fusion-bench-featcal", "torch", "transformers")
_NOT_OF_A_POOL = ("featcal", "default_taskpool")  # keys that FusionBench's pools do not read


@dataclass
class CellRunner:
    """Runs the cells of one command in this process.

    The merged model of the current merger is in memory, and every method gets a copy of it.

    Attributes:
        inputs: The pools and the device.
        suite: Name of the model pool.
        seed: Seed of each merger and method, so that cells are independent of one another.
        tasks: Tasks of the comparison, or None for all.
        all_tasks: Tasks of the whole pool.
        folder: Folder of finished cells, which are not run again.
        program: FusionBench's program.
        log_dir: Folder for the reports of FusionBench's task pools.
    """

    inputs: MethodInputs
    suite: str
    seed: int
    tasks: list[str] | None
    all_tasks: list[str]
    folder: Path
    program: Any = None
    log_dir: Path | None = None
    _merged: dict[str, tuple[nn.Module, dict[str, Any]] | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool = self.inputs.modelpool
        self._pools = [_config_of(pool), _config_of(self.inputs.taskpool), self.tasks]
        # A model in memory has no name to identify it by: cells with it are not used again.
        self._pools.append(time.time_ns() if pool.has_instance_models else None)
        self._pools.append([version(package) for package in _PACKAGES])
        fabric = self.inputs.fabric
        self._pools.append([fabric.device.type, str(fabric.strategy.precision.precision)])

    def file(self, cell: Cell) -> Path:
        """Return a cell's file. Its name has the digest of pools, merger, row and versions."""
        made_of: list[Any] = [cell.row]
        if cell.merger is not None:  # references have no random numbers
            settings = cell.method.settings if cell.method else None
            made_of += [self.seed, plain(cell.merger.config), plain(cell.config), settings]
            made_of.append(_own_code(cell.method))
        text = json.dumps([self._pools, made_of], sort_keys=True, default=str)
        title = re.sub(r"[^0-9A-Za-z_.+-]", "_", cell.title)
        return self.folder / f"{title}-{digest_text(text)[:16]}{SUFFIX}"

    def run(self, cell: Cell) -> CellResult:
        """Return the result of a finished cell, or run it and write its file."""
        path = self.file(cell)
        try:
            if path.exists():
                result = load_cell(path)
                with contextlib.suppress(OSError):  # in a folder that is read-only
                    path.touch()  # of cells that differ in code or versions the last one counts
                log.info("%s is finished: %s", cell.title, path.name)
                return result
        except ReportError as error:
            log.warning("%s. It runs again", error)
        lightning.seed_everything(self.seed, verbose=False)
        try:
            result = self._result(cell)
        finally:
            gc.collect()  # frees models in reference cycles before the next one is loaded
        names = list(self.inputs.modelpool.model_names)
        is_count = self.tasks is None or self.tasks == self.all_tasks[: len(names)]
        result.settings["tasks"] = len(names) if is_count else ", ".join(names)
        result.conditions["precision"] = str(self.inputs.fabric.strategy.precision.precision)
        result.versions = versions() | commits()
        result.device = describe_device(self.inputs.fabric.device)
        save_cell(path, result)
        return result

    def _result(self, cell: Cell) -> CellResult:
        if cell.merger is None:
            return self._of(cell, self._base() if cell.row == BASE else self._experts())
        merged, merging = self._merged_model(cell.merger)
        if cell.method is None:
            return self._merger_result(cell, merged, merging)
        merged = copied_module(merged)
        with measure() as cost:
            model = cell.method.post_merge(merged, self.inputs)
        del merged
        if model is None:
            raise CalibrationError(f"{type(cell.method).__name__}.post_merge returned no model")
        result = self._of(cell, self._evaluated(cell.title, model), cell.method.settings)
        result.conditions = _of_the_merger(cell.merger, result.settings)
        result.cost = cost.as_dict() | _deployed(model, cell.method.added(model))
        if isinstance(merging.get("seconds"), float):
            result.cost[TOTAL_SECONDS] = merging["seconds"] + cost.seconds
        result.samples = cell.method.samples(model, list(result.accuracy))
        result.curves = as_curves(getattr(model, "curves", {}), "the model's curves")
        return result

    def _merger_result(
        self, cell: Cell, merged: nn.Module, merging: Mapping[str, Any]
    ) -> CellResult:
        settings = plain(cell.merger.config) if cell.merger else {}
        result = self._of(cell, self._evaluated(cell.row, merged), settings)
        result.cost = {**merging, **_deployed(merged, {})}
        number, split = settings.get("samples_per_task"), settings.get("calibration_split", "train")
        if number is None and "adamerging" in str(settings.get("name")):
            number, split = sys.maxsize, "test"  # it trains its coefficients on the test split
        if number is not None:
            pool = self.inputs.modelpool
            result.samples = samples_used(pool, pool.model_names, number, str(split))
        return result

    def _merged_model(self, merger: Merger) -> tuple[nn.Module, dict[str, Any]]:
        """Return the merged model and its cost. It is merged once.

        Raises:
            CalibrationError: If the merger failed before.
        """
        if merger.name not in self._merged:  # another merger's cells are finished
            self._merged.clear()
        merged = self._merged.get(merger.name)
        if isinstance(merged, str):
            raise CalibrationError(f"not merged: {merged}")
        if merged is None:
            config, pool = OmegaConf.create(merger.config), self.inputs.modelpool
            try:
                with measure() as cost:
                    model = run_merger(self.program, config, pool, merger.setting)
            except Exception as error:
                self._merged[merger.name] = reason_of(error)
                raise
            merged = self._merged[merger.name] = model, cost.as_dict()
        return merged

    def _base(self) -> Evaluation:
        return self._evaluated(BASE, load_pool_model(self.inputs.modelpool, BASE_MODEL))

    def _experts(self) -> Evaluation:
        """Evaluate the experts, each on its task."""
        pool = self.inputs.modelpool
        tasks = self.tasks or task_names(self.inputs.taskpool) or pool.model_names
        without = [task for task in tasks if task not in pool.model_names]
        if without:
            raise CalibrationError(
                f"the model pool has no expert for the tasks {without}: set "
                f"modelpool.models.{without[0]}, or leave experts out of method.references"
            )
        return join(self._evaluated(t, load_pool_model(pool, t), [t]) for t in tasks)

    def _evaluated(
        self, name: str, model: nn.Module, tasks: Sequence[str] | None = None
    ) -> Evaluation:
        tasks = self.tasks if tasks is None else tasks
        taskpool = self.inputs.taskpool
        return evaluate(taskpool, model, name=name, tasks=tasks, log_dir=self.log_dir)

    def _of(
        self, cell: Cell, evaluation: Evaluation, settings: Mapping[str, Any] | None = None
    ) -> CellResult:
        finite, infinite = finite_losses(evaluation.loss)
        settings = dict(settings or {})
        seed = settings.get("seed")
        return CellResult(
            suite=self.suite,
            merger=cell.merger.name if cell.merger else "",
            row=cell.row,
            accuracy=evaluation.accuracy,
            loss=finite,
            notes=list(infinite.values()),
            correct=evaluation.correct,
            settings=settings,
            seed=seed if isinstance(seed, int) else None,
        )


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure, for reports."""
    return str(error).strip() or type(error).__name__


def _of_the_merger(merger: Merger, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merger's settings. Keys that a method has too get the merger's name."""
    return {
        f"{merger.name}.{key}" if key in settings else key: value
        for key, value in plain(merger.config).items()
    }


def _own_code(method: Any) -> str | None:
    """Return the source of a method that is not part of this package, which users change."""
    kind = type(method)
    if method is None or kind.__module__.startswith("fusion_bench"):
        return None
    try:
        return Path(inspect.getsourcefile(kind) or "").read_text(encoding="utf-8")
    except (OSError, TypeError):  # typed at a prompt
        return None


def _config_of(pool: Any) -> Any:
    config = plain(getattr(pool, "config", None))
    if not isinstance(config, Mapping):
        return config
    return {key: value for key, value in config.items() if key not in _NOT_OF_A_POOL}


def _deployed(model: nn.Module, added: Mapping[str, int]) -> dict[str, Any]:
    """Return what a model needs at inference in addition to the merged model."""
    return {
        # In FusionBench's protocol a surgery model receives the task with every batch.
        TASK_ID: "yes" if getattr(model, "is_surgery_model", False) else "no",
        MODULES_ADDED: len(added),
        PARAMETERS_ADDED: sum(added.values()),
    }
