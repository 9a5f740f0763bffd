"""Parts of runs that cases name in configs."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attacks.paths  # noqa: F401

# isort: split
from comparison_parts import Scale
from fusion_bench import BaseAlgorithm
from torch import nn

from fusion_bench_featcal.tasks import load_images


def number_of(model: nn.Module) -> int:
    """A number that tells any two sets of weights apart."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return int(digest.hexdigest()[:12], 16)


class Numbered(Scale):
    """A post-merging method whose number of added parameters tells the weights it was given."""

    def post_merge(self, merged: nn.Module, inputs: Any) -> nn.Module:
        """Leave the model as it is."""
        self._number = number_of(merged)
        return merged

    def added(self, model: nn.Module) -> Mapping[str, int]:  # type: ignore[override]
        """Tell the number."""
        return {"weights": self._number}


class Recorder(BaseAlgorithm):
    """A merger that leaves a file when it runs, and returns the first expert."""

    def __init__(self, path: str) -> None:
        """Take the file's path."""
        super().__init__()
        self._path = Path(path)

    def run(self, modelpool: Any) -> nn.Module:  # type: ignore[override]
        """Leave the file."""
        self._path.touch()
        return modelpool.load_model(modelpool.model_names[0])


class SlowImages:
    """Pictures that take their time, so that a run can be ended meanwhile."""

    def __init__(self, path: str, seconds: float) -> None:
        """Find the pictures of a folder."""
        self._items, self._seconds = load_images(path), seconds

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._seconds)
        return self._items[index]


class VanishingExpert:
    """Pictures whose reading removes a file: an expert goes away after it was found."""

    def __init__(self, path: str, victim: str) -> None:
        """Find the pictures of a folder."""
        self._items, self._victim = load_images(path), Path(victim)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        self._victim.unlink(missing_ok=True)
        return self._items[index]


class TracingImages:
    """Pictures that write a word to a file whenever one of them is read."""

    def __init__(self, path: str, trace: str, name: str) -> None:
        """Find the pictures of a folder."""
        self._items, self._trace, self._name = load_images(path), Path(trace), name

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        with self._trace.open("a") as file:
            file.write(f"{self._name}\n")
        return self._items[index]
