"""Finished cells and merged models on disk: whole or absent, each in a folder of its own."""

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn

from fusion_bench_featcal.compare import ReportError, load_items, prepare_directory, save_items
from fusion_bench_featcal.compare.curves import Curves, as_curves
from fusion_bench_featcal.compare.files import plain, read_json, write_atomic
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

SETTING = "method.results_dir"
_RESULT = "result.json"
_WEIGHTS = "model.safetensors"
_COST = "cost.json"
_ROW = "cell"


@dataclass(kw_only=True)
class CellResult:
    """What one cell of the grid gave.

    Attributes:
        accuracy: Task -> accuracy in 0..1.
        settings: What made it.
        cost: What it cost, and what it adds to the model; see `Report.cost`.
        samples: Task -> {"samples", "split"} really used; empty for what uses no data.
        seed: The seed of its samples and training; None for what has none.
        notes: Sentences that a reader must know.
        curves: Task -> (step, loss) of its training, in order; empty where nothing was trained.
        correct: Task -> bool `[items]`; None where the task pool does not tell.
    """

    accuracy: dict[str, float]
    settings: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, Any] = field(default_factory=dict)
    samples: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int | None = None
    notes: list[str] = field(default_factory=list)
    curves: Curves = field(default_factory=dict)
    correct: Mapping[str, Any] | None = None


class ResultStore:
    """Results by name and fingerprint, in one folder that may serve many comparisons."""

    def __init__(self, folder: str | Path) -> None:
        """Make the folder.

        Args:
            folder: Where results are kept.

        Raises:
            ReportError: If it cannot be made or written.
        """
        self.folder = prepare_directory(folder, SETTING)

    def result(self, name: str, key: str) -> CellResult | None:
        """The finished result of a cell; None if there is none that is whole.

        Args:
            name: The cell's name.
            key: The fingerprint of what it depends on.
        """
        folder = self._place("cells", name, key)
        if not (folder / _RESULT).is_file():
            return None
        try:
            content = read_json(folder / _RESULT)
            has_items = content.pop("has_items")
            result = CellResult(**content)
            result.curves = as_curves(result.curves, str(folder))
            result.correct = (load_items(folder) or {})[_ROW] if has_items else None
        except (ReportError, KeyError, TypeError, AttributeError) as error:
            log.warning("the result in %s is damaged and made again: %s", folder, error)
            return None
        return result

    def keep_result(self, name: str, key: str, result: CellResult) -> None:
        """Keep a finished cell; `result.json` comes last, so that it stands for the whole.

        Raises:
            ReportError: If it cannot be written.
        """
        folder = prepare_directory(self._place("cells", name, key), SETTING)
        if result.correct is not None:
            save_items(folder, {_ROW: result.correct}, SETTING)
        names = [entry.name for entry in fields(result) if entry.name != "correct"]
        content = {entry: plain(getattr(result, entry), entry) for entry in names}
        content["has_items"] = result.correct is not None
        write_atomic(folder / _RESULT, json.dumps(content, indent=2) + "\n", SETTING)

    def has_model(self, name: str, key: str) -> bool:
        """Whether a merged model is kept."""
        return (self._place("upstreams", name, key) / _WEIGHTS).is_file()

    def keep_model(self, name: str, key: str, model: nn.Module, cost: Mapping[str, Any]) -> None:
        """Keep a merged model's weights, and what merging cost; the weights come last.

        Raises:
            ReportError: If they cannot be written.
        """
        folder = prepare_directory(self._place("upstreams", name, key), SETTING)
        text = json.dumps(plain(cost, "cost"), indent=2) + "\n"
        write_atomic(folder / _COST, text, SETTING)
        # Copies: safetensors refuses tensors that share memory, and tied weights do.
        state = {entry: tensor.clone() for entry, tensor in model.state_dict().items()}
        with tempfile.TemporaryDirectory(dir=folder, prefix=".", suffix=".part") as partial:
            save_file(state, Path(partial) / _WEIGHTS)
            os.replace(Path(partial) / _WEIGHTS, folder / _WEIGHTS)

    def model(
        self, name: str, key: str, load_like: Callable[[], nn.Module]
    ) -> tuple[nn.Module, dict[str, Any]]:
        """Load a merged model that was kept.

        Args:
            name: Its name.
            key: Its fingerprint.
            load_like: Loads a model of its class, whose weights are replaced.

        Returns:
            The model, bit by bit as it was, without gradients; and what merging cost.

        Raises:
            CalibrationError: If the weights do not fit that class.
        """
        path = self._place("upstreams", name, key) / _WEIGHTS
        state = load_file(path)
        model = load_like()
        known = model.state_dict()
        # Replacing the tensors keeps the merged model's dtype, but would part tied weights.
        assign = any(known[e].dtype != t.dtype for e, t in state.items() if e in known)
        try:
            model.load_state_dict(state, assign=assign)
        except RuntimeError as error:
            raise CalibrationError(
                f"the model that {name} made ({path}) is not of the base's class: {error}"
            ) from error
        return model.requires_grad_(False), read_json(path.with_name(_COST))

    def _place(self, kind: str, name: str, key: str) -> Path:
        return self.folder / kind / f"{re.sub(r'[^0-9A-Za-z_.+-]', '_', name)}-{key}"
