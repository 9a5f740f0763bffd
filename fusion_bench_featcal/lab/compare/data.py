"""Data behind results: drawn samples and test items, identified by their content."""

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from fusion_bench import BaseModelPool, BaseTaskPool
from PIL import Image
from torch import Tensor

from fusion_bench_featcal.calibration_data import draw_samples, load_rows
from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.digests import digest_tensor
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.compare.entries import OWN
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings
from fusion_bench_featcal.tasks.item_pool import build_part

log = logging.getLogger(__name__)

_LENGTH = 32
_SPLITS = ("train", "val", "test")
# Classes of this package, under all of their import paths.
_WITHOUT_DATA = ("AnchorOnly", "AnchorOnlyAlgorithm")
# By `_target_` or, for FusionBench's older methods, `name`. All others may read any split.
_SPLITS_READ: dict[str, tuple[str, ...]] = {
    "fusion_bench.method.SimpleAverageAlgorithm": (),
    "fusion_bench.method.TaskArithmeticAlgorithm": (),
    "fusion_bench.method.TiesMergingAlgorithm": (),
    "fusion_bench.method.WUDIMerging": (),
    "fusion_bench.method.DareTaskArithmetic": (),
    "fusion_bench.method.TaskSingularVectorMerging": (),
    "fusion_bench.method.ISO_C_Merge": (),
    "fusion_bench.method.ISO_CTS_Merge": (),
    "fusion_bench.method.opcm.opcm.OPCMForCLIP": (),
    "fusion_bench.method.singular_value_calibration.task_arithmetic"
    ".SingularValueCalibrationArithmeticTask": (),
    "clip_layer_wise_adamerging": ("test",),
    "clip_task_wise_adamerging": ("test",),
}


def test_items_read(config: Any) -> bool:
    """Return whether a FusionBench merger is known to train on items of the test split."""
    return "test" in _SPLITS_READ.get(config.get("_target_", config.get("name")), ())


@dataclass(frozen=True)
class Draw:
    """A draw of samples from a split: a number for each task, or None for all, and a seed."""

    split: str
    samples: int | None = None
    seed: int = 0


@dataclass
class DataDigests:
    """Digests of a model pool's and a task pool's items. Each dataset is digested once per run.

    Attributes:
        modelpool: The pool with the samples.
        taskpool: The pool with the test items.
    """

    modelpool: BaseModelPool
    taskpool: BaseTaskPool
    _digests: dict[Any, Any] = field(default_factory=dict)

    def digests_of_samples(self, config: Any, settings: Any = None) -> dict[str, Any]:
        """Return the samples that a merger or method draws: draw -> task -> digest.

        Args:
            config: Its config. For a chain, a mapping of its steps' configs.
            settings: All its settings, including defaults that the config lacks.
        """
        draws = dict.fromkeys(_draws(plain(config), settings))
        return {
            repr(draw): {
                task: self._drawn_of(draw, task)
                for task in getattr(self.modelpool, f"{draw.split}_dataset_names")
            }
            for draw in draws
        }

    def tested(self) -> dict[str, Any]:
        """Return task -> digest of all its test items, or nothing and a log line if none are known.

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
                setting = f"taskpool.test_datasets.{name}"
                load = lambda c=config, p=setting: build_part(p, c)  # noqa: E731
                digests[name] = self._rows(setting, load, _key_of(config))
        return digests

    def _drawn_of(self, draw: Draw, task: str) -> Any:
        key: Any = (draw, task)
        config = _key_of(getattr(self.modelpool, f"_{draw.split}_datasets")[task])
        if draw.samples is None:
            key = config or key
        setting = f"modelpool.{draw.split}_datasets.{task}"
        choose = partial(_indices, draw, task)
        return self._rows(
            setting, lambda: load_rows(self.modelpool, task, draw.split), key, choose, config
        )

    def _rows(
        self,
        setting: str,
        load: Callable[[], Any],
        key: Any = None,
        choose: Callable[[int], Iterable[int] | None] = lambda size: None,
        config: Any = None,
    ) -> Any:
        """Return the digest of some rows, or of class, length and config if that fails."""
        if key is not None and key in self._digests:
            return self._digests[key]
        rows: Any = None
        try:
            rows = load()
            digest: Any = digest_rows(rows, choose(len(rows)))
        except CalibrationError:
            raise
        # Datasets may raise anything. The cell that reads them reports it.
        except Exception as error:
            log.warning("%s counts in fingerprints by class, length and config: %s", setting, error)
            length = len(rows) if hasattr(rows, "__len__") else None
            digest = {"class": type(rows).__qualname__, "length": length, "config": config}
        if key is not None:
            self._digests[key] = digest
        return digest


def _key_of(config: Any) -> tuple[str, str] | None:
    """A dataset's config as a key, if all of it is plain."""
    try:
        return "config", json.dumps(plain(config), sort_keys=True)
    except (TypeError, ValueError):
        return None


def _indices(draw: Draw, task: str, available: int) -> list[int] | None:
    if draw.samples is None:
        return None
    number = min(draw.samples, available)
    settings = FeatCalSettings(samples_per_task=number, seed=draw.seed)
    return draw_samples(available, task, settings)


def _draws(config: Any, settings: Any) -> Iterator[Draw]:
    """Yield the draws of a method according to its settings, or all samples if unknown."""
    if not isinstance(config, Mapping):
        return
    kind = config.get("_target_", config.get("name"))
    if not isinstance(kind, str):
        for name, step in config.items():  # a chain
            yield from _draws(step, settings.get(name) if isinstance(settings, Mapping) else None)
        return
    is_ours = kind.startswith(OWN)
    if isinstance(config.get("of"), Mapping):  # the wrapped method draws as well
        yield from _draws(config["of"], None)
    if is_ours and kind.rpartition(".")[2] in _WITHOUT_DATA:
        return
    values = {**config, **(settings if isinstance(settings, Mapping) else {})}
    number, seed = values.get("samples_per_task"), values.get("seed", 42)
    if not is_ours or number is None:
        yield from (Draw(split) for split in _SPLITS_READ.get(kind, _SPLITS))
        return
    split = str(values.get("calibration_split", "train"))
    yield Draw("test" if values.get("stream") == "test_tta" else split, number, seed)


def digest_rows(rows: Any, indices: Iterable[int] | None = None) -> str:
    """Return the digest of items as stored. Files are read, but nothing is decoded.

    Args:
        rows: A dataset with a length and numbered items.
        indices: The items, in order, by default all.

    Raises:
        TypeError: If the dataset has no numbered items, or an item contains something without
            comparable content, such as a function.
    """
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise TypeError(f"{type(rows).__name__} has no numbered items")
    if isinstance(rows, datasets.Dataset) and rows.format["type"] != "custom":
        rows = _undecoded(rows)
    digest = hashlib.sha256()
    for index in range(len(rows)) if indices is None else indices:
        _add(digest, rows.read(index) if isinstance(rows, ImageItems) else rows[index])
    return digest.hexdigest()[:_LENGTH]


def _undecoded(rows: datasets.Dataset) -> datasets.Dataset:
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    return rows.with_format(None)


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}\n".encode())
        for key in sorted(value, key=str):
            digest.update(f"{key}\n".encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)}\n".encode())
        for entry in value:
            _add(digest, entry)
    elif isinstance(value, bytes):
        digest.update(b"bytes %d\n" % len(value) + value)
    elif isinstance(value, str | Path):
        digest.update(f"text {len(str(value))} {value}\n".encode(errors="surrogatepass"))
        path = Path(value).expanduser() if "\0" not in str(value) else Path()
        if os.path.isfile(path):  # unlike Path.is_file, it does not raise for very long texts
            digest.update(path.read_bytes())
    elif isinstance(value, Image.Image):
        digest.update(f"picture {value.mode} {value.size}\n".encode() + value.tobytes())
    elif isinstance(value, Tensor):
        digest.update(f"tensor {digest_tensor(value)}\n".encode())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"array {value.dtype} {value.shape}\n".encode() + value.tobytes())
    elif value is None or isinstance(value, bool | int | float | np.generic):
        digest.update(f"{type(value).__name__} {value!r}\n".encode())
    else:
        raise TypeError(f"an item holds a {type(value).__name__}")
