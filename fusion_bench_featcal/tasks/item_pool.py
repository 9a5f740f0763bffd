"""Base of this package's task pools: keys, loading, and evaluation with flags per item."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from fusion_bench.utils import count_parameters, instantiate
from torch import Tensor, nn

from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.models.hub import fetch, note_data_set
from fusion_bench_featcal.run.progress import progress_bar


class ItemPool:
    """Mixin that evaluates a task pool's tasks in turn and stores the correctness of every item.

    Attributes:
        item_correct: Result of the last `evaluate` call: task name -> bool tensor `[items]`, in the
            order of the dataset, on the CPU.
        test_dataloaders: Task name -> its data. `evaluate` uses the tasks in it.
    """

    _is_setup = False
    _program: Any  # that made the pool, or None; FusionBench sets it
    _test_datasets: Mapping[str, Any] | None
    _setting_of_data = "taskpool.test_datasets.{}"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Pass all arguments to the task pool."""
        super().__init__(*args, **kwargs)
        self.item_correct: dict[str, Tensor] = {}
        self.test_dataloaders: dict[str, Any] = {}

    def setup(self) -> None:
        """Load everything for the evaluation."""
        raise NotImplementedError

    def evaluate(self, model: nn.Module, name: str | None = None) -> dict[str, Any]:
        """Evaluate a model on the tasks in `test_dataloaders`.

        Returns:
            `{"model_info": {...}, <task>: {"accuracy", "loss"}, "average": {"accuracy", "loss"}}`.

        Raises:
            CalibrationError: If something cannot be loaded or an item cannot be evaluated.
            TypeError: If the model is of the wrong kind.
        """
        if not self._is_setup:
            self.setup()
        self.item_correct = {}
        tasks = progress_bar(list(self.test_dataloaders), what="evaluating", unit="task")
        with self._prepared(model) as prepared:
            scores = {task: self._score(prepared, task) for task in tasks}
        for task, score in scores.items():
            if score.correct is not None:
                self.item_correct[task] = score.correct
        trainable, total = count_parameters(model)
        info: dict[str, Any] = {"trainable_params": trainable, "all_params": total}
        info["trainable_percentage"] = trainable / total
        if name is not None:
            info["name"] = name
        measured = {t: {"accuracy": s.accuracy, "loss": s.loss} for t, s in scores.items()}
        average = {k: fmean(m[k] for m in measured.values()) for k in ("accuracy", "loss")}
        return {"model_info": info, **measured, "average": average}

    @property
    def test_data(self) -> dict[str, Any]:
        """Data of tasks by name: this pool's `test_datasets`, else the model pool's.

        Raises:
            ValueError: If a task has no data in either pool, or there are no tasks.
        """
        return self._data_of(self._test_datasets)

    def _data_of(self, tasks: Iterable[str] | None) -> dict[str, Any]:
        """Return the data of some tasks, by default of all in the model pool. Raises as above."""
        modelpool = getattr(self._program, "modelpool", None)
        shared = getattr(modelpool, "_test_datasets", None) or {}
        own = {t: rows for t, rows in (self._test_datasets or {}).items() if rows is not None}
        data = {task: own.get(task, shared.get(task)) for task in tasks or shared}
        for task in (task for task, rows in data.items() if rows is None):
            raise ValueError(
                f"task {task!r} has no test data: set {self._setting_of_data.format(task)} or "
                f"modelpool.test_datasets.{task}{nearest_hint(task, shared)}"
            )
        if not data:
            raise ValueError(
                "taskpool has no tasks: name their data under taskpool.test_datasets or "
                "modelpool.test_datasets"
            )
        return data

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[Any]:
        """Context with the model ready for evaluation."""
        yield model

    def _score(self, model: Any, task: str) -> Score:
        """Score a prepared model on one task."""
        raise NotImplementedError


def refuse_unknown_pool_keys(pool: Any, unknown: Mapping[str, Any]) -> None:
    """Refuse keys of a task pool's YAML that neither the pool nor FusionBench has.

    Raises:
        ValueError: If there is such a key, with the nearest valid one.
    """
    refuse_unknown(unknown, pool._config_mapping.values(), "taskpool.")


def load_part(setting: str, value: Any, kind: Any, **options: Any) -> Any:
    """Load a component of the task pool from a folder, a hub id or a configuration, or return it.

    Raises:
        ValueError: If there is no value.
        CalibrationError: If it cannot be loaded.
    """
    if value is None:
        raise ValueError(f"{setting} is not set: set it or taskpool.base_model.")
    if not isinstance(value, str):
        return build_part(setting, value)
    folder = fetch(value, f"{setting}={value}", weights=issubclass(kind, nn.Module))
    with naming_setting(setting, value):
        return kind.from_pretrained(folder, trust_remote_code=False, **options)


def build_part(setting: str, value: Any) -> Any:
    """Instantiate a configuration with `_target_`. Return anything else unchanged.

    Raises:
        CalibrationError: If it cannot be loaded.
    """
    if not (isinstance(value, Mapping) and "_target_" in value):
        return value
    with naming_setting(setting):
        part = instantiate(value)
    note_data_set(part)
    return part
