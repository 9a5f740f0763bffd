"""Cells of a comparison: built, evaluated and timed, or read from their files."""

import gc
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.files import new_path
from fusion_bench_featcal.fusionbench.data import samples_used
from fusion_bench_featcal.fusionbench.evaluation import Evaluation, evaluate, join, task_names
from fusion_bench_featcal.fusionbench.inputs import MethodInputs
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.lab.compare.grid import Cell, Merger
from fusion_bench_featcal.lab.rivals.method import Method
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import (
    BASE,
    ReportError,
    Run,
    describe_device,
    measure,
    read_run,
    versions,
    write_run,
)
from fusion_bench_featcal.results.lines import RUN_FILE
from fusion_bench_featcal.results.run import conditions_of, training_lines
from fusion_bench_featcal.results.show import TASK_ID
from fusion_bench_featcal.run.digests import digest_text, own_code

log = logging.getLogger(__name__)

_PACKAGES = ("fusion-bench", "fusion-bench-featcal", "torch", "transformers")
RESULTS_DIR = "method.results_dir"
TOTAL_SECONDS = "seconds_with_merger"
_NOT_OF_A_POOL = ("featcal", "default_taskpool")  # keys that FusionBench's pools do not read


@dataclass
class CellRunner:
    """Runs the cells of one command in this process.

    The merged model of the current merger is in memory, and every method gets a copy of it.

    Attributes:
        inputs: The pools, the device and the program.
        suite: Name of the model pool.
        seed: Seed of each merger and method, so that cells are independent of one another.
        tasks: Tasks of the comparison, or None for all.
        tasks_label: Their number or names, which distinguishes rows in reports.
        folder: Folder of finished cells, which are not run again.
    """

    inputs: MethodInputs
    suite: str
    seed: int
    tasks: list[str] | None
    tasks_label: int | str
    folder: Path
    _merged: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pool, fabric = self.inputs.modelpool, self.inputs.fabric
        self._precision = str(fabric.strategy.precision.precision)
        self._common = [
            *(_config_of(pool), _config_of(self.inputs.taskpool), self.tasks),
            # A model in memory has no name to identify it by: cells with it are not used again.
            time.time_ns() if pool.has_instance_models else None,
            *([version(package) for package in _PACKAGES], fabric.device.type, self._precision),
        ]

    def path(self, cell: Cell) -> Path:
        """Return a cell's folder. Its name has the digest of pools, merger, row and versions."""
        made_of: list[Any] = [cell.row]
        if cell.merger is not None:  # references have no random numbers
            settings = cell.method.settings if cell.method else None
            made_of += [self.seed, plain(cell.merger.config), plain(cell.config), settings]
            made_of.append(_own_code(cell.method))
        text = json.dumps([self._common, made_of], sort_keys=True, default=str)
        title = re.sub(r"[^0-9A-Za-z_.+-]", "_", cell.title)
        return self.folder / f"{title}-{digest_text(text)[:16]}"

    def run(self, cell: Cell) -> Run:
        """Return a finished cell, or run it and write its folder."""
        path = self.path(cell)
        if path.exists():
            try:
                done = read_run(path)
                with suppress(OSError):  # in a folder that is read-only
                    os.utime(path / RUN_FILE)  # of rows that differ in code the last one counts
                log.info("%s is finished: %s", cell.title, path.name)
                return done
            except ReportError as error:
                log.warning("%s. It runs again", error)
        lightning.seed_everything(self.seed, verbose=False)
        try:
            evaluation, details = self._evaluated_cell(cell)
        finally:
            gc.collect()  # frees models in reference cycles before the next one is loaded
        curves = details.pop("curves", {})
        done = Run(suite=self.suite, merger=cell.merger.name if cell.merger else "")
        done.add_row(cell.row, evaluation.scores, correct=evaluation.correct, **details)
        done.lines += training_lines(cell.row, curves)
        done.rows[0].settings["tasks"] = self.tasks_label
        done.rows[0].conditions["precision"] = self._precision
        done.versions = versions() | commits()
        done.device = describe_device(self.inputs.fabric.device)
        _write(path, done)
        return done

    def _evaluated_cell(self, cell: Cell) -> tuple[Evaluation, dict[str, Any]]:
        """Build and evaluate a cell's model. Return also the details of its row."""
        if cell.merger is None:
            if cell.row == BASE:
                base = load_pool_model(self.inputs.modelpool, BASE_MODEL)
                return self._evaluated(base), {}
            return self._experts(), {}
        merged, merging = self._merged_model(cell.merger)
        if cell.method is not None:
            return self._improved(cell, cell.merger, merged, merging)
        settings = dict(plain(cell.merger.config))
        cost = {**merging, **_deployed(merged, {})}
        details = {"seed": self.seed, "settings": settings, "cost": cost}
        number, split = settings.get("samples_per_task"), settings.get("calibration_split", "train")
        if number is None and "adamerging" in str(settings.get("name")):
            number, split = sys.maxsize, "test"  # it trains its coefficients on the test split
        if number is not None:
            pool = self.inputs.modelpool
            details["samples"] = samples_used(pool, pool.model_names, number, str(split))
        return self._evaluated(merged), details

    def _improved(
        self, cell: Cell, merger: Merger, merged: nn.Module, merging: Mapping[str, float]
    ) -> tuple[Evaluation, dict[str, Any]]:
        """Improve a copy of the merged model, and evaluate it."""
        method = cell.method
        copy = copied_module(merged)
        with measure() as cost:
            model = method.post_merge(copy, self.inputs)
        del copy
        if model is None:
            raise CalibrationError(f"{type(method).__name__}.post_merge returned no model")
        evaluation = self._evaluated(model)
        details = {
            "seed": self.seed,
            "settings": dict(method.settings),
            "conditions": conditions_of(merger.name, plain(merger.config), method.settings),
            "cost": cost.as_dict() | _deployed(model, method.added(model)),
            "samples": method.samples(list(evaluation.by_task)),
            "curves": getattr(model, "curves", {}),
        }
        if "seconds" in merging:
            details["cost"][TOTAL_SECONDS] = merging["seconds"] + (cost.seconds or 0.0)
        return evaluation, details

    def _merged_model(self, merger: Merger) -> tuple[nn.Module, dict[str, float]]:
        """Return the merged model and its cost. It is merged once.

        Raises:
            CalibrationError: If the merger failed before.
        """
        if merger.name not in self._merged:  # another merger's cells are finished
            self._merged.clear()
            config = OmegaConf.create(merger.config)
            try:
                with measure() as cost:
                    model = run_merger(
                        self.inputs.program, config, self.inputs.modelpool, merger.setting
                    )
            except Exception as error:
                self._merged[merger.name] = reason_of(error)
                raise
            self._merged[merger.name] = model, cost.as_dict()
        merged = self._merged[merger.name]
        if isinstance(merged, str):
            raise CalibrationError(f"not merged: {merged}")
        return merged

    def _experts(self) -> Evaluation:
        """Evaluate the experts, each on its task."""
        pool = self.inputs.modelpool
        tasks = self.tasks or task_names(self.inputs.taskpool) or pool.model_names
        for task in tasks:
            if task not in pool.model_names:
                raise CalibrationError(
                    f"the model pool has no expert for the task {task}: set "
                    f"modelpool.models.{task}, or leave experts out of method.references"
                )
        return join(evaluate(self.inputs.taskpool, load_pool_model(pool, t), [t]) for t in tasks)

    def _evaluated(self, model: nn.Module) -> Evaluation:
        return evaluate(self.inputs.taskpool, model, self.tasks)


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure, for reports."""
    return str(error).strip() or type(error).__name__


def _write(path: Path, done: Run) -> None:
    """Write a finished cell: its folder is complete or absent."""
    try:
        with new_path(path) as part:
            write_run(part, done, RESULTS_DIR)
            shutil.rmtree(path, ignore_errors=True)  # a damaged one
    except OSError:
        if not (path / RUN_FILE).exists():  # else another job has finished it at the same time
            raise


def _own_code(method: Method | None) -> list[str | None]:
    """Return the sources of a method, and of the rule and the family that its settings name."""
    if method is None:
        return []
    settings = [value for value in method.settings.values() if isinstance(value, Mapping)]
    targets = [value["_target_"] for value in settings if "_target_" in value]
    return [own_code(kind) for kind in (type(method), *map(resolve_name, targets))]


def _config_of(pool: Any) -> Any:
    config = plain(getattr(pool, "config", None))
    if not isinstance(config, Mapping):
        return config
    return {key: value for key, value in config.items() if key not in _NOT_OF_A_POOL}


def _deployed(model: nn.Module, added: Mapping[str, int]) -> dict[str, float]:
    """Return what a model needs at inference in addition to the merged model."""
    return {
        # In FusionBench's protocol a surgery model receives the task with every batch.
        TASK_ID: int(getattr(model, "is_surgery_model", False)),
        "modules_added": len(added),
        "parameters_added": sum(added.values()),
    }
