"""Base of this package's task pools: keys, loading, and evaluation with per-example results."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from statistics import fmean
from typing import Any

from fusion_bench.mixins import LightningFabricMixin
from fusion_bench.utils import count_parameters
from torch import Tensor, nn

from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import nearest_hint, refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.config_checks import refuse_missing_paths
from fusion_bench_featcal.fusionbench.processors import build_part
from fusion_bench_featcal.run.progress import progress_bar
from fusion_bench_featcal.settings.fields import is_integer


def open_rows(task: str, rows: object, setting: str) -> TextRows:
    """Open a task's test examples, from a path, a hub id or a dataset.

    Args:
        task: The task.
        rows: A path, a hub id, or a dataset.
        setting: The setting that names it, for messages.

    Raises:
        CalibrationError: If the data cannot be loaded or are empty.
    """
    if isinstance(rows, str):
        with error_context(setting, cause=unloadable):
            rows = load_texts(rows, "test")
    opened = TextRows(rows, f"task {task!r}, {setting}")
    if not len(opened):
        raise CalibrationError(f"task {task!r} has no test examples. Check {setting}.")
    return opened


class ItemPool(LightningFabricMixin):
    """Mixin that evaluates a pool's tasks in turn and stores which examples are correct.

    Attributes:
        item_correct: Result of the last `evaluate` call: task name -> bool tensor `[items]`, in the
            order of the dataset, on the CPU.
        test_dataloaders: Task name -> its data. `evaluate` evaluates these tasks.
    """

    _is_setup = False
    _program: Any  # the program that created the pool, or None; set by FusionBench
    _config_mapping: Any  # attribute -> key of the pool, set by each pool's class
    _test_datasets: Mapping[str, Any] | None
    _setting_of_data = "taskpool.test_datasets.{}"
    _keys_by_task: Sequence[str] = ()  # attributes that map tasks to values

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Pass all arguments to the task pool."""
        super().__init__(*args, **kwargs)
        self.item_correct: dict[str, Tensor] = {}
        self.test_dataloaders: dict[str, Any] = {}

    def _check_keys(self, unknown: Iterable[str], **counts: object) -> None:
        """Refuse unknown keys of the pool, and counts that are no whole numbers from 1.

        Raises:
            ValueError: Naming key and value.
        """
        refuse_unknown(unknown, self._config_mapping.values(), "taskpool.")
        for key, value in counts.items():
            if not is_integer(value, 1):
                raise ValueError(f"taskpool.{key} must be a whole number >= 1, got {value!r}")

    @cached_property
    def opened(self) -> dict[str, Any]:
        """Task -> its opened test data for all evaluations. The first example is read.

        Tokenizers and processors are loaded as well.

        Raises:
            CalibrationError: If data cannot be loaded or are empty, or a first example is unusable.
            ValueError: If a task has no data. For images also if it has no class names, or
                FusionBench has others.
        """
        self._load_processors()
        opened = {}
        for task, data in self.test_data.items():
            setting = self._setting(task)
            opened[task] = self._open(task, build_part(setting, data), setting)
        return opened

    def _load_processors(self) -> None:
        """Load what converts test data to inputs. The default needs nothing."""

    def _open(self, task: str, rows: object, setting: str) -> Any:
        """Open a task's examples, and read the first one."""
        raise NotImplementedError

    def setup(self) -> None:
        """Open the data, then load models. The first `evaluate` call does it.

        Raises:
            CalibrationError: If something cannot be loaded. See also `opened`.
        """
        loaders = dict(self.opened)
        self._load_models()
        self.test_dataloaders, self._is_setup = loaders, True

    def _load_models(self) -> None:
        """Load the models that an evaluation needs. The default needs none."""

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
        info: dict[str, object] = {"trainable_params": trainable, "all_params": total}
        info |= {"trainable_percentage": trainable / total} | ({"name": name} if name else {})
        measured = {t: {"accuracy": s.accuracy, "loss": s.loss} for t, s in scores.items()}
        average = {k: fmean(m[k] for m in measured.values()) for k in ("accuracy", "loss")}
        return {"model_info": info, **measured, "average": average}

    @property
    def test_data(self) -> dict[str, object]:
        """Task -> its data in this pool's config or, without any, in the model pool's.

        Nothing is opened.

        Raises:
            ValueError: If a task has no data in either pool, a path does not exist, there are no
                tasks, or a key names another task.
        """
        modelpool = getattr(self._program, "modelpool", None)
        shared, named = getattr(modelpool, "_test_datasets", None) or {}, self._named_data
        data = {t: shared.get(t) if named.get(t) is None else named[t] for t in named or shared}
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
        refuse_missing_paths({"": {self._setting(task): rows for task, rows in data.items()}})
        for key in self._keys_by_task:
            refuse_unknown(getattr(self, key), data, f"taskpool.{key}.")
        return data

    @property
    def _named_data(self) -> Mapping[str, object]:
        """Task -> its data in this pool's config, or None to use the model pool's."""
        return self._test_datasets or {}

    def _setting(self, task: str) -> str:
        """Return the setting that names a task's data, for messages."""
        pool = "modelpool" if self._named_data.get(task) is None else "taskpool"
        return f"{pool}.test_datasets.{task}"

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[Any]:
        """Context with the model ready for evaluation, on the device."""
        yield self.fabric.to_device(model).eval()

    def _score(self, model: Any, task: str) -> Score:
        """Score a prepared model on one task."""
        raise NotImplementedError
