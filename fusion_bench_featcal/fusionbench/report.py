"""The report of a run, which evaluates models when they are added, and is written at the end."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from lightning.fabric.loggers import CSVLogger
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.files.suite_paths import without_roots
from fusion_bench_featcal.fusionbench.evaluation import (
    PoolEvaluation,
    evaluate,
    join_evaluations,
    task_names,
)
from fusion_bench_featcal.fusionbench.method_inputs import MethodInputs
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, load_pool_model
from fusion_bench_featcal.fusionbench.run_settings import plain_config
from fusion_bench_featcal.models.hub import commits
from fusion_bench_featcal.results import (
    BASE,
    EXPERTS,
    Cost,
    Frame,
    Run,
    accuracy_frame,
    describe_device,
    versions,
    write_run,
)
from fusion_bench_featcal.results.names import INPUTS, NO_EXPERT, REFERENCES
from fusion_bench_featcal.results.notes import FAILED, NOTE, Note
from fusion_bench_featcal.results.rows import with_average
from fusion_bench_featcal.results.run import Facts, conditions_of

log = logging.getLogger(__name__)

_PACKAGE_KEYS = ("featcal", "default_taskpool")  # FusionBench's pools do not read them
_NOT_INPUTS = ("_usage_", "_version_", "dataloader_kwargs")  # keys that change no result
_NOT_LOCATIONS = {"split", "calibration_split", "name", "task", "tasks", "style"}


class Report:
    """Evaluates models on one pool and collects their results.

    Without a task pool nothing is evaluated.

    Attributes:
        run: The results, with one row for each model.
    """

    def __init__(
        self,
        inputs: MethodInputs,
        *,
        suite: str,
        merger: str,
        base_method: object = None,
        tasks: Sequence[str] | None = None,
        tasks_label: int | str | None = None,
    ) -> None:
        """Start a report.

        Args:
            inputs: The pools, the device and the program.
            suite: Name of the model pool.
            merger: Name of the merged model in the report.
            base_method: Config of the merging method.
            tasks: Tasks to evaluate, by default all.
            tasks_label: Number or names of the merged tasks, by default the number of experts.
        """
        device = describe_device(inputs.fabric.device)
        self.run = Run(suite=suite, merger=merger, versions=versions(), device=device)
        self._inputs, self._tasks = inputs, tasks
        precision = str(inputs.fabric.strategy.precision.precision)
        label = len(inputs.modelpool.model_names) if tasks_label is None else tasks_label
        self._conditions = {"precision": precision, "tasks": label, **digest_pools(inputs)}
        self._base_method = dict(plain_config(base_method) or {})
        self._experts = frozenset(inputs.modelpool.model_names)
        self._failed: dict[str, Exception] = {}

    def warn(self, notes: Sequence[str]) -> None:
        """Log warnings, and note them in the report."""
        for text in notes:
            log.warning(text)
            self.run.note(Note(NOTE, text))

    @contextmanager
    def continue_on_error(self, name: str, *, alone: bool) -> Iterator[None]:
        """Context of one model, whose failure becomes a note, so that the run continues.

        Args:
            name: The model's name in the report.
            alone: Whether a failure ends the run, because there is no other model, or because
                several processes would wait for each other.
        """
        try:
            yield
        except Exception as error:  # calibration, task pool, disk or a user's rule may raise
            if alone:
                raise
            is_expected = isinstance(error, CalibrationError | ValueError)
            log.error("%s failed: %s", name, first_line(error), exc_info=not is_expected)
            self.run.note(Note(FAILED, first_line(error), name))
            self._failed[name] = error

    def add(
        self, name: str, model: nn.Module, facts: Facts | None = None, cost: Cost | None = None
    ) -> PoolEvaluation | None:
        """Evaluate a model and add its results. Without a task pool, add only a method's costs.

        Args:
            name: The model's name in the report.
            model: The model.
            facts: Its settings, samples and further data for the report.
            cost: Time and memory of its method, None for references.

        Returns:
            The evaluation, if there is a task pool.
        """
        if self._inputs.taskpool is None and cost is None:
            return None
        facts, evaluation = facts or Facts(), None
        if self._inputs.taskpool is not None:
            log.info("evaluating %s", name)
            evaluation = evaluate(self._inputs.taskpool, model, self._tasks)
            scored = {task for values in evaluation.scores.values() for task in values}
            unscored = [task for task in facts.samples if task not in scored]
            text = (
                f"{', '.join(unscored)}: calibrated but not evaluated, so not part of any average. "
                "Add test data to the task pool: default_taskpool.tasks or "
                "default_taskpool.test_datasets"
            )
            # If all tasks are unscored, the task pool has other names for them.
            is_partial = 0 < len(unscored) < len(facts.samples)
            if is_partial and text not in {note.text for note in self.run.notes}:
                self.run.note(Note(NOTE, text))
        self._add(name, evaluation or PoolEvaluation({}, {}, None), facts, cost)
        return evaluation

    def _add(
        self, name: str, evaluation: PoolEvaluation, facts: Facts, cost: Cost | None = None
    ) -> None:
        """Add results under the conditions of this run.

        Tasks without an expert get metrics of their own, unless no task has one.
        """
        costs, scores = None if cost is None else cost.as_dict(), dict[str, dict[str, float]]()
        for metric, by_task in evaluation.scores.items():
            has_experts = not self._experts.isdisjoint(by_task)
            for task, value in by_task.items():
                is_apart = has_experts and task not in self._experts
                scores.setdefault(metric + NO_EXPERT * is_apart, {})[task] = value
        row = self.run.add_model(name, scores, facts, correct=evaluation.correct, cost=costs)
        row.conditions |= self._conditions
        if row.is_repair:
            taken = row.settings | self._conditions
            row.conditions |= conditions_of(self.run.merger, self._base_method, taken)
        values = {
            f"{row.title}/{task}/{metric}": value
            for metric, by_task in scores.items()
            for task, value in with_average(by_task).items()
        }
        for logger in self._inputs.fabric.loggers if values else ():
            if not isinstance(logger, CSVLogger):  # lines.csv has the same numbers
                logger.log_metrics(values, step=len(self.run.rows) - 1)
                logger.save()

    def add_references(
        self, names: Sequence[str], on_base_loaded: Callable[[str, nn.Module], None] | None = None
    ) -> None:
        """Load and evaluate references, one model at a time.

        Args:
            names: The references: `base`, `experts` or both. Other names are ignored.
            on_base_loaded: Called with the base's name and model before its evaluation.
        """
        pool, taskpool = self._inputs.modelpool, self._inputs.taskpool
        if BASE in names and pool.has_pretrained and (on_base_loaded or taskpool is not None):
            base = load_pool_model(pool, BASE_MODEL)
            if on_base_loaded is not None:
                on_base_loaded(BASE, base)
            self.add(BASE, base)
            del base  # frees it before the experts
        if EXPERTS not in names or taskpool is None:
            return
        tasks = self._tasks or task_names(taskpool) or self.run.tasks or pool.model_names
        if missing := [task for task in tasks if task not in self._experts]:
            text = f"{', '.join(missing)}: no expert in the model pool, so not part of any average"
            self.run.note(Note(NOTE, text))
            tasks = [task for task in tasks if task in self._experts]
        log.info("evaluating experts, each on its own task")
        evaluations = (evaluate(taskpool, load_pool_model(pool, t), [t]) for t in tasks)
        if tasks:
            self._add(EXPERTS, join_evaluations(evaluations), Facts())

    def close(self, folder: Path | None) -> Frame:
        """Sort the results, write them to a folder, and return the frame of their accuracies.

        Raises:
            Exception: If all models of methods failed, the error of the first one.
        """
        run = self.run
        if self._failed and not any(row.is_repair for row in run.rows):
            raise next(iter(self._failed.values()))
        first = [*REFERENCES, run.merger]  # references are evaluated last
        run.rows.sort(key=lambda row: first.index(row.name) if row.name in first else len(first))
        seeds = {row.seed for row in run.rows if row.seed is not None}
        for merged in (row for row in run.rows if row.name == run.merger):
            if merged.seed is None and len(seeds) == 1:  # else it is compared with every seed
                (merged.seed,) = seeds
        run.versions |= commits()
        frame = accuracy_frame(run)
        if folder is not None:
            write_run(folder, run, frame=frame)
        return frame


def config_of(pool: object) -> Any:
    """Return a pool's config without the keys that only this package reads."""
    config = plain_config(getattr(pool, "config", None))
    if not isinstance(config, Mapping):
        return config
    return {key: value for key, value in config.items() if key not in _PACKAGE_KEYS}


def with_contents(value: object, digest: Callable[[str], str | None], name: str = "") -> object:
    """Return a config in which each path of local files becomes a list: path and digest.

    Paths of suites and fetched weights are returned unchanged, because these files do not change.

    Args:
        value: The config, or a value in it.
        digest: Returns the digest of the files at a path, or None if the text is not a path.
        name: The value's key.
    """
    if isinstance(value, Mapping):
        return {key: with_contents(entry, digest, str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_contents(entry, digest, name) for entry in value]
    if not isinstance(value, str) or name in _NOT_LOCATIONS or not re.search(r"\w", value):
        return value
    content = digest(value) if without_roots(value) == value else None
    return value if content is None else [value, content]


def digest_config(config: object) -> str:
    """Return the digest of a plain config. It does not depend on the folders of the suites."""
    text = json.dumps(config, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(without_roots(text).encode()).hexdigest()


def digest_pools(inputs: MethodInputs) -> dict[str, str]:
    """Return the condition `inputs` of the results: a digest of the pools' models and data.

    The digest includes the contents of local files. A pool with models in memory has no digest,
    because no name identifies these models.
    """
    if inputs.modelpool.has_instance_models:
        return {}
    configs = [
        {key: value for key, value in (config_of(pool) or {}).items() if key not in _NOT_INPUTS}
        for pool in (inputs.modelpool, inputs.taskpool)
    ]
    return {INPUTS: digest_config(with_contents(configs, inputs.digest))[:8]}


def suite_name(modelpool: BaseModelPool) -> str:
    """Return the model pool's name on the command line, or without one its class name."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized() and (name := HydraConfig.get().runtime.choices.get("modelpool")):
        return str(name)
    return type(modelpool).__name__
