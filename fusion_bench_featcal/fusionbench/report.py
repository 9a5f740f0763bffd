"""The report of a run: models are evaluated when they are added, and written at the end."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.files.suite_paths import without_roots
from fusion_bench_featcal.fusionbench.evaluation import (
    PoolEvaluation,
    evaluate,
    joined_evaluation,
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
from fusion_bench_featcal.results.names import INPUTS, REFERENCES
from fusion_bench_featcal.results.notes import FAILED, NOTE, Note
from fusion_bench_featcal.results.run import Facts, conditions_of

log = logging.getLogger(__name__)

_NOT_OF_A_POOL = ("featcal", "default_taskpool")  # keys that FusionBench's pools do not read
_NOT_INPUTS = ("_usage_", "_version_", "dataloader_kwargs")  # keys that change no result
_NO_PLACES = {"split", "calibration_split", "name", "task", "tasks", "style"}


class Report:
    """Rows of models on one pool.

    Without a task pool nothing is evaluated.

    Attributes:
        run: The rows.
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
            merger: Name of the upstream merger's row.
            base_method: Config of that merger.
            tasks: Tasks to evaluate, by default all.
            tasks_label: Number or names of the merged tasks, by default the number of experts.
        """
        device = describe_device(inputs.fabric.device)
        self.run = Run(suite=suite, merger=merger, versions=versions(), device=device)
        self._inputs, self._tasks = inputs, tasks
        precision = str(inputs.fabric.strategy.precision.precision)
        label = len(inputs.modelpool.model_names) if tasks_label is None else tasks_label
        self._conditions = {"precision": precision, "tasks": label, **digest_of_pools(inputs)}
        self._base_method = dict(plain_config(base_method) or {})
        self._failed: dict[str, Exception] = {}

    def warn(self, notes: Sequence[str]) -> None:
        """Warn of something at once, and note it in the report."""
        for text in notes:
            log.warning(text)
            self.run.note(Note(NOTE, text))

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
            self.run.note(Note(FAILED, first_line(error), name))
            self._failed[name] = error

    def add(
        self, name: str, model: nn.Module, facts: Facts | None = None, cost: Cost | None = None
    ) -> PoolEvaluation | None:
        """Evaluate a model and add its row. Without a task pool, add only a method's costs.

        Args:
            name: Its row.
            model: The model.
            facts: What else is known of it.
            cost: Time and memory of its method, None for references.

        Returns:
            The evaluation, if there is a task pool.
        """
        if self._inputs.taskpool is None and cost is None:
            return None
        evaluation = None
        if self._inputs.taskpool is not None:
            log.info("evaluating %s", name)
            evaluation = evaluate(self._inputs.taskpool, model, self._tasks)
            self._note_unscored(evaluation, facts or Facts())
        self._add(name, evaluation, facts or Facts(), cost)
        return evaluation

    def _note_unscored(self, evaluation: PoolEvaluation, facts: Facts) -> None:
        """Note tasks that a model was calibrated on, and that the task pool does not have."""
        scored = {task for values in evaluation.scores.values() for task in values}
        unscored = [task for task in facts.samples if task not in scored]
        if not 0 < len(unscored) < len(facts.samples):  # some pools have names of their own
            return
        text = (
            f"{', '.join(unscored)}: calibrated, but not evaluated and in no average. Add tests to "
            "the task pool: default_taskpool.tasks or default_taskpool.test_datasets"
        )
        if text not in {note.text for note in self.run.notes}:
            self.run.note(Note(NOTE, text))

    def _add(
        self, name: str, evaluation: PoolEvaluation | None, facts: Facts, cost: Cost | None = None
    ) -> None:
        correct = None if evaluation is None else evaluation.correct
        scores = {} if evaluation is None else evaluation.scores
        costs = None if cost is None else cost.as_dict()
        row = self.run.add_model(name, scores, facts, correct=correct, cost=costs)
        row.conditions |= self._conditions
        if row.is_repair:
            taken = row.settings | self._conditions
            row.conditions |= conditions_of(self.run.merger, self._base_method, taken)

    def add_references(
        self, names: Sequence[str], watch: Callable[[str, nn.Module], None] | None = None
    ) -> None:
        """Load and evaluate the base and the experts named in `names`, one at a time.

        Args:
            names: Of `base` and `experts`.
            watch: Called with the base's row and model before its evaluation.
        """
        pool, taskpool = self._inputs.modelpool, self._inputs.taskpool
        if BASE in names and pool.has_pretrained and (watch or taskpool is not None):
            base = load_pool_model(pool, BASE_MODEL)
            if watch is not None:
                watch(BASE, base)
            self.add(BASE, base)
            del base  # frees it before the experts
        if EXPERTS not in names or taskpool is None:
            return
        experts = pool.model_names
        tasks = self._tasks or task_names(taskpool) or self.run.tasks or list(experts)
        if missing := [task for task in tasks if task not in experts]:
            note = f"no row of experts: the model pool has none for {', '.join(missing)}"
            self.run.note(Note(NOTE, note))
            return
        log.info("evaluating experts, each on its own task")
        row = joined_evaluation(evaluate(taskpool, load_pool_model(pool, t), [t]) for t in tasks)
        self._add(EXPERTS, row, Facts())

    def close(self, folder: Path | None) -> Frame:
        """Order the rows, write them to a folder, and return the frame of their accuracies.

        Raises:
            Exception: That of the first row that failed, if there is no other one.
        """
        run = self.run
        if self._failed and not any(row.is_repair for row in run.rows):
            raise next(iter(self._failed.values()))
        first = [*REFERENCES, run.merger]  # references are evaluated last
        run.rows.sort(key=lambda row: first.index(row.name) if row.name in first else len(first))
        seeds = {row.seed for row in run.rows if row.seed is not None}
        for merged in (row for row in run.rows if row.name == run.merger):
            if merged.seed is None and len(seeds) == 1:  # else it goes with rows of every seed
                (merged.seed,) = seeds
        run.versions |= commits()
        frame = accuracy_frame(run)
        if folder is not None:
            write_run(folder, run, frame=frame)
        return frame


def config_of(pool: object) -> Any:
    """Return a pool's config, without the keys of this package."""
    config = plain_config(getattr(pool, "config", None))
    if not isinstance(config, Mapping):
        return config
    return {key: value for key, value in config.items() if key not in _NOT_OF_A_POOL}


def with_contents(value: object, digest: Callable[[str], str | None], name: str = "") -> object:
    """Return a config in which each text that names files here has their digest beside it.

    The files of suites and fetched weights do not change, so these texts stay as they are.

    Args:
        value: The config, or a value in it.
        digest: Returns the digest of the files that a text names, or None.
        name: The value's name.
    """
    if isinstance(value, Mapping):
        return {key: with_contents(entry, digest, str(key)) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [with_contents(entry, digest, name) for entry in value]
    if not isinstance(value, str) or name in _NO_PLACES or not re.search(r"\w", value):
        return value
    content = digest(value) if without_roots(value) == value else None
    return value if content is None else [value, content]


def digest_config(config: object) -> str:
    """Return the digest of plain configs, equal wherever suites and fetched weights lie."""
    text = json.dumps(config, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(without_roots(text).encode()).hexdigest()


def digest_of_pools(inputs: MethodInputs) -> dict[str, str]:
    """Return the condition `inputs` of rows: a digest of the pools' models and data.

    Files here count by content. A model in memory has no name to identify it by, so such pools have
    none.
    """
    if inputs.modelpool.has_instance_models:
        return {}
    configs = [
        {key: value for key, value in (config_of(pool) or {}).items() if key not in _NOT_INPUTS}
        for pool in (inputs.modelpool, inputs.taskpool)
    ]
    return {INPUTS: digest_config(with_contents(configs, inputs.digest))[:8]}


def suite_name(modelpool: BaseModelPool) -> str:
    """Return the model pool's name on the command line, else its class."""
    from hydra.core.hydra_config import HydraConfig

    if HydraConfig.initialized() and (name := HydraConfig.get().runtime.choices.get("modelpool")):
        return str(name)
    return type(modelpool).__name__
