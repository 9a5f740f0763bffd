"""Data that results are made from: drawn samples and test items, by their content."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fusion_bench import BaseModelPool, BaseTaskPool

from fusion_bench_featcal.calibration_data import draw_samples
from fusion_bench_featcal.comparison.digests import config_text, digest_rows
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tasks.pool_settings import build_part

log = logging.getLogger(__name__)

_SPLITS = ("train", "val", "test")
_OWN = "fusion_bench_featcal."
_WITHOUT_DATA = ("AnchorOnly", "AnchorOnlyAlgorithm")  # our own, under any of their paths
# By `_target_` or, for FusionBench's older methods, `name`; all others may read any split.
_SPLITS_READ: dict[str, tuple[str, ...]] = {
    "fusion_bench.method.SimpleAverageAlgorithm": (),
    "fusion_bench.method.TaskArithmeticAlgorithm": (),
    "fusion_bench.method.TiesMergingAlgorithm": (),
    "fusion_bench.method.WUDIMerging": (),
    "clip_layer_wise_adamerging": ("test",),
    "clip_task_wise_adamerging": ("test",),
}


@dataclass(frozen=True)
class Draw:
    """Samples that a method takes: so many of each task, or all.

    Attributes:
        split: The split they are from.
        samples: Number for each task; None: all.
        seed: Seeds the draw.
    """

    split: str
    samples: int | None = None
    seed: int = 0


@dataclass
class DataDigests:
    """Digests of a model pool's and a task pool's items; each data set is digested once in a run.

    Attributes:
        modelpool: The pool with the samples.
        taskpool: The pool with the test items.
    """

    modelpool: BaseModelPool
    taskpool: BaseTaskPool
    _digests: dict[Any, Any] = field(default_factory=dict)

    def drawn(self, config: Any, settings: Any = None) -> dict[str, Any]:
        """Samples that a merger or method draws: draw -> task -> digest.

        Args:
            config: Its config; for a chain a mapping of its steps' configs.
            settings: All its settings, where defaults are not in the config.
        """
        draws = dict.fromkeys(_draws(plain(config), settings))
        return {repr(draw): self._draw(draw) for draw in draws}

    def tested(self) -> dict[str, Any]:
        """Task -> digest of all its test items; empty, with a line in the log, if none are known.

        Raises:
            CalibrationError: If the data of a task cannot be loaded.
        """
        opened: Mapping[str, Any] = getattr(self.taskpool, "_open_tasks", None) or {}
        configured = getattr(self.taskpool, "_test_datasets", None) or {}
        if not opened and not configured:
            log.info(
                "%s does not show its test items: they count in fingerprints by its config alone",
                type(self.taskpool).__name__,
            )
        digests = {
            name: self._rows(f"task {name!r}", lambda task=task: task.items)
            for name, task in opened.items()
        }
        for name, config in configured.items():
            if name not in digests:
                place = f"taskpool.test_datasets.{name}"
                text = config_text(config)
                key = None if text is None else ("config", text)
                digests[name] = self._rows(place, lambda c=config, p=place: build_part(p, c), key)
        return digests

    def _draw(self, draw: Draw) -> dict[str, Any]:
        names = getattr(self.modelpool, f"{draw.split}_dataset_names")
        return {task: self._drawn_of(draw, task) for task in names}

    def _drawn_of(self, draw: Draw, task: str) -> Any:
        key: Any = (draw, task)
        if draw.samples is None:
            config = getattr(self.modelpool, f"_{draw.split}_datasets")[task]
            text = config_text(config)
            key = key if text is None else ("config", text)
        load = getattr(self.modelpool, f"load_{draw.split}_dataset")
        return self._rows(
            f"modelpool.{draw.split}_datasets.{task}",
            lambda: load(task),
            key,
            lambda available: _indices(draw, task, available),
        )

    def _rows(
        self,
        place: str,
        load: Callable[[], Any],
        key: Any = None,
        choose: Callable[[int], Iterable[int] | None] = lambda available: None,
    ) -> Any:
        """Digest of some rows; class and length of what cannot be digested."""
        if key is not None and key in self._digests:
            return self._digests[key]
        rows: Any = None
        try:
            rows = load()
            found: Any = digest_rows(rows, choose(len(rows)))
        except CalibrationError:
            raise
        # Whatever data sets raise; the cell that reads them says more about it.
        except Exception as error:
            log.warning("%s counts in fingerprints by class and length alone: %s", place, error)
            length = len(rows) if hasattr(rows, "__len__") else None
            found = {"class": type(rows).__qualname__, "length": length}
        if key is not None:
            self._digests[key] = found
        return found


def _indices(draw: Draw, task: str, available: int) -> list[int] | None:
    if draw.samples is None:
        return None
    number = min(draw.samples, available)
    settings = FeatCalSettings(samples_per_task=number, seed=draw.seed)
    return draw_samples(available, task, settings)


def _draws(config: Any, settings: Any) -> Iterator[Draw]:
    """Samples that a method draws, as its settings tell; where they do not, all of them."""
    if not isinstance(config, Mapping):
        return
    kind = config.get("_target_", config.get("name"))
    if not isinstance(kind, str):
        for name, step in config.items():  # a chain
            yield from _draws(step, settings.get(name) if isinstance(settings, Mapping) else None)
        return
    values = {**config, **(settings if isinstance(settings, Mapping) else {})}
    number, seed = values.get("samples_per_task"), values.get("seed", 42)
    if kind.startswith(_OWN) and kind.rpartition(".")[2] in _WITHOUT_DATA:
        return
    if kind in _SPLITS_READ or not kind.startswith(_OWN) or number is None:
        yield from (Draw(split) for split in _SPLITS_READ.get(kind, _SPLITS))
        return
    split = str(values.get("calibration_split", "train"))
    yield Draw("test" if values.get("stream") == "test_tta" else split, number, seed)
