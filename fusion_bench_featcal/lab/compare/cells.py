"""Cells of a comparison: built, evaluated and timed, or read from their files."""

import gc
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import lightning
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files import new_path, write_atomic
from fusion_bench_featcal.fusionbench.data import samples_used
from fusion_bench_featcal.fusionbench.method import Method, inference_overhead, run_method
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.report import Report, config_of, digest_config, with_contents
from fusion_bench_featcal.fusionbench.run_settings import plain_config
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.lab.compare.grid import Cell, MergerEntry
from fusion_bench_featcal.lab.compare.settings import ComparisonSettings
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import Cost, ReportError, Run, measure, read_run, write_run
from fusion_bench_featcal.results.lines import RUN_FILE
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.digests import own_code

log = logging.getLogger(__name__)

_PACKAGES = ("fusion-bench", "fusion-bench-featcal", "torch", "transformers")
RESULTS_DIR = "method.results_dir"
TOTAL_SECONDS = "seconds_with_merger"


@dataclass
class CellRunner:
    """Runs the cells of one command in this process.

    The merged model of the current merger is in memory, and every method gets a copy of it.

    Attributes:
        inputs: The pools, the device and the program.
        settings: Settings of the comparison. Its seed is set before each merger and method, so that
            cells are independent of one another.
        suite: Name of the model pool.
        tasks: Tasks of the comparison, or None for all.
        tasks_label: Number or names of the tasks, which distinguishes results in reports.
        folder: Folder of finished cells, which do not run again.
    """

    inputs: MethodInputs
    settings: ComparisonSettings
    suite: str
    tasks: list[str] | None
    tasks_label: int | str
    folder: Path
    _merged: dict[str, Any] = field(default_factory=dict)  # at most one merger's

    def __post_init__(self) -> None:
        pool, fabric = self.inputs.modelpool, self.inputs.fabric
        precision = str(fabric.strategy.precision.precision)
        self._common = [
            *(config_of(pool), config_of(self.inputs.taskpool), self.tasks),
            # A model in memory has no name that identifies it, so its cells are not used again.
            time.time_ns() if pool.has_instance_models else None,
            *([version(package) for package in _PACKAGES], fabric.device.type, precision),
        ]

    def path(self, cell: Cell) -> Path:
        """Return a cell's folder, whose name has a digest of pools, merger, method and versions.

        Models and data on this machine count by content.
        """
        ingredients: list[Any] = [cell.name]
        if cell.merger is not None:  # references have no random numbers
            settings = cell.method.settings if cell.method else None
            configs = plain_config(cell.merger.config), plain_config(cell.config)
            ingredients += [self.settings.seed, *configs, settings, _own_code(cell.method)]
        title = re.sub(r"[^0-9A-Za-z_.+-]", "_", cell.title)
        digest = digest_config(with_contents([self._common, ingredients], self.inputs.digest))
        return self.folder / f"{title}-{digest[:16]}"

    def run(self, cell: Cell) -> Run:
        """Return a finished cell, or run it and write its folder."""
        path = self.path(cell)
        if path.exists():
            try:
                done = read_run(path)
                with suppress(OSError):  # in a folder that is read-only
                    os.utime(path / RUN_FILE)  # of cells that differ in code the last one counts
                log.info("%s is finished: %s", cell.title, path.name)
                return done
            except ReportError as error:
                log.warning("%s. It runs again", error)
        lightning.seed_everything(self.settings.seed, verbose=False)
        merger, config = (cell.merger.name, cell.merger.config) if cell.merger else ("", None)
        names = {"suite": self.suite, "merger": merger, "base_method": config}
        report = Report(self.inputs, tasks=self.tasks, tasks_label=self.tasks_label, **names)
        try:
            files = self._build_and_report(cell, report)
        finally:
            gc.collect()  # frees models in reference cycles before the next one is loaded
        report.run.versions |= commits()
        _write(path, report.run, files)
        return report.run

    def _build_and_report(self, cell: Cell, report: Report) -> Mapping[str, str]:
        """Build and evaluate a cell's model. Return the texts of its method's files by name."""
        if cell.merger is None:
            report.add_references([cell.name])
            if not report.run.rows:
                raise CalibrationError(
                    f"{report.run.notes[-1].text}: set modelpool.models, or leave {cell.name} out "
                    "of method.references"
                )
            return {}
        merged, merger_cost = self._merge(cell.merger)
        if cell.method is None:
            report.add(cell.name, merged, self._merger_facts(cell.merger, merged), merger_cost)
            return {}
        with measure() as cost:
            result = run_method(cell.method, merged, self.inputs)
        if merger_cost.seconds is not None and cost.seconds is not None:
            cost.more[TOTAL_SECONDS] = merger_cost.seconds + cost.seconds
        facts = replace(cell.method.facts(cell.name, result), seed=self.settings.seed)
        report.add(cell.name, result.model, facts, cost)
        return facts.files

    def _merger_facts(self, merger: MergerEntry, merged: nn.Module) -> Facts:
        """Return what a report says about a merged model."""
        settings = dict(plain_config(merger.config))
        number, split = settings.get("samples_per_task"), settings.get("calibration_split", "train")
        if merger.name in (self.settings.reads_test or ()):
            number, split = sys.maxsize, "test"
        pool, samples = self.inputs.modelpool, {}
        if number is not None:
            samples = samples_used(pool, pool.model_names, number, str(split))
        cost = inference_overhead(merged, {})
        return Facts(settings=settings, seed=self.settings.seed, samples=samples, cost=cost)

    def _merge(self, merger: MergerEntry) -> tuple[nn.Module, Cost]:
        """Return the merged model and its cost. The merger runs only once.

        Raises:
            CalibrationError: If the merger failed before.
        """
        if merger.name not in self._merged:  # another merger's cells are finished
            self._merged.clear()
            config = OmegaConf.create(merger.config)
            upstream = Upstream(config, self.inputs.models, setting=merger.setting)
            try:
                with measure() as cost:
                    model = upstream.merged_model(self.inputs.program)
            except Exception as error:
                self._merged[merger.name] = reason_of(error)
                raise
            self._merged[merger.name] = model, cost
        merged = self._merged[merger.name]
        if isinstance(merged, str):
            raise CalibrationError(f"not merged: {merged}")
        return merged


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure, for reports."""
    return str(error).strip() or type(error).__name__


def _write(path: Path, run: Run, files: Mapping[str, str]) -> None:
    """Write the folder of a finished cell, which is complete or absent."""
    try:
        with new_path(path) as unfinished:
            write_run(unfinished, run, RESULTS_DIR)
            for name, text in files.items():
                write_atomic(unfinished / name, text, RESULTS_DIR)
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
    return [own_code(cls) for cls in (type(method), *map(resolve_name, targets))]
