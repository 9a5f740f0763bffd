"""Finished cells and merged models on disk, complete or absent, each in a separate folder."""

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import nn

from fusion_bench_featcal.digests import digest_file
from fusion_bench_featcal.files import remove, remove_orphans, write_atomic
from fusion_bench_featcal.json_files import plain, read_json, sealed_json
from fusion_bench_featcal.results import ReportError, load_items, prepare_directory, save_items
from fusion_bench_featcal.results.curves import Curves, as_curves
from fusion_bench_featcal.results.items import ITEMS_FILE
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.tensor_files import read_tensors, write_tensors

log = logging.getLogger(__name__)

SETTING = "method.results_dir"
_RESULT = "result.json"
_WEIGHTS = "model.safetensors"
_COST = "cost.json"
_ROW = "cell"
# Any error of reading a damaged file or its content.
_DAMAGES = (ReportError, OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(kw_only=True)
class CellResult:
    """Result of one cell of the grid.

    Attributes:
        accuracy: Task -> accuracy in 0..1.
        loss: Task -> loss, if the task pool computes one and it is finite.
        settings: Its settings.
        cost: Its cost, and the size that it adds to the model (see `Report.cost`).
        samples: Task -> {"samples", "split"} used, empty for methods without data.
        seed: The seed of its samples and training, or None without randomness.
        notes: Sentences for the reader.
        curves: Task -> (step, loss) of its training, in order, empty without training.
        correct: Task -> bool `[items]`, or None if the task pool has no such flags.
    """

    accuracy: dict[str, float]
    loss: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    notes: list[str] = field(default_factory=list)
    curves: Curves = field(default_factory=dict)
    correct: Mapping[str, Any] | None = None


class ResultStore:
    """Results by name and fingerprint, in one folder that may serve many comparisons.

    Stored entries have digests. An entry that is damaged, unreadable or obstructed is logged and
    computed again. Failing to write an entry has no other consequences.
    """

    def __init__(self, folder: str | Path) -> None:
        """Create the folder, and remove incomplete files of interrupted runs."""
        self.folder = prepare_directory(folder, SETTING)
        # The folder may contain foreign files: only names of this package's temporary files are
        # removed.
        paths = [self.folder, *self.folder.glob("*"), *self.folder.glob("cells/*")]
        paths += self.folder.glob("upstreams/*")
        for path in paths:
            remove_orphans(path, ".")

    def result(self, name: str, key: str) -> CellResult | None:
        """Return a finished cell by its name and fingerprint, or None if no cell is complete."""
        folder = self._path("cells", name, key)
        if not os.path.lexists(folder / _RESULT):
            return None
        try:
            content = read_json(folder / _RESULT, sealed=True)
            items = content.pop("items")
            result = CellResult(**content)
            result.curves = as_curves(result.curves, str(folder))
            if items is not None:
                if digest_file(folder / ITEMS_FILE) != items:
                    raise ReportError(f"{ITEMS_FILE} is not the one that was kept")
                result.correct = (load_items(folder) or {})[_ROW]
        except _DAMAGES as error:
            log.warning("the result in %s is damaged and made again: %s", folder, error)
            return None
        return result

    def keep_result(self, name: str, key: str, result: CellResult) -> None:
        """Store a finished cell. `result.json` is written last and marks it as complete.

        Raises:
            ReportError: If a part of it has no JSON form.
        """
        folder, items = self._path("cells", name, key), None
        names = [entry.name for entry in fields(result) if entry.name != "correct"]
        content = {entry: plain(getattr(result, entry), entry) for entry in names}
        try:
            _make_way(folder, (_RESULT, ITEMS_FILE))
            if result.correct is not None:
                items = digest_file(save_items(folder, {_ROW: result.correct}, SETTING))
            write_atomic(folder / _RESULT, sealed_json({**content, "items": items}), SETTING)
        except (ReportError, OSError) as error:
            log.warning("the result of %s is not kept, and will be made again: %s", name, error)

    def keep_model(self, name: str, key: str, model: nn.Module, cost: Mapping[str, Any]) -> bool:
        """Store a merged model's weights and its cost. `cost.json` is written last.

        Returns:
            Whether it was stored. A full disk does not stop the run.
        """
        folder = self._path("upstreams", name, key)
        content = {"cost": plain(cost, "cost")}
        try:
            _make_way(folder, (_WEIGHTS, _COST))
            content["weights"] = write_tensors(folder / _WEIGHTS, model.state_dict())
            write_atomic(folder / _COST, sealed_json(content), SETTING)
        except (ReportError, OSError) as error:
            log.warning("the model that %s made is not kept: %s", name, error)
            return False
        return True

    def model(
        self, name: str, key: str, load_like: Callable[[], nn.Module]
    ) -> tuple[nn.Module, dict[str, Any]] | None:
        """Load a stored merged model, by its name and fingerprint, and its cost.

        The weights of the model from `load_like` are replaced. None if no model is complete.

        Raises:
            CalibrationError: If the weights do not fit that model.
        """
        folder = self._path("upstreams", name, key)
        path = folder / _WEIGHTS
        if not os.path.lexists(folder / _COST):
            return None
        try:
            content = read_json(folder / _COST, sealed=True)
            cost, state = content["cost"], read_tensors(path, content["weights"])
        except _DAMAGES as error:
            log.warning("the merged model in %s is damaged and made again: %s", folder, error)
            return None
        model = load_like()
        tensors = model.state_dict()
        # Replacing tensors keeps the merged model's dtypes, but would separate tied weights.
        assign = any(tensors[e].dtype != t.dtype for e, t in state.items() if e in tensors)
        try:
            model.load_state_dict(state, assign=assign)
        except RuntimeError as error:
            raise CalibrationError(
                f"the model that {name} made ({path}) is not of the base's class: {error}"
            ) from error
        return model.requires_grad_(False), cost

    def claim(self, name: str, key: str) -> Path:
        """Return the path of a cell's claims, for `claims.claimed`."""
        return self._path("claims", name, key)

    def _path(self, kind: str, name: str, key: str) -> Path:
        return self.folder / kind / f"{re.sub(r'[^0-9A-Za-z_.+-]', '_', name)}-{key}"


def _make_way(folder: Path, files: Sequence[str]) -> None:
    """Create an entry's folder, and remove files and folders that obstruct it."""
    in_the_way = [path for path in (folder.parent, folder) if not path.is_dir()]
    in_the_way += [folder / name for name in files if (folder / name).is_dir()]
    for path in in_the_way:
        if os.path.lexists(path):
            log.warning("%s is in the way of a result and is removed", path)
            remove(path)
    prepare_directory(folder, SETTING)
