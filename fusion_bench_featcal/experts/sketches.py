"""Sketches of experts' tensors: short vectors that tell distances between tensors.

A sketch is linear, so that of a merged tensor follows from those of the models. It is made in one
pass over an expert and serves every later run with that expert.
"""

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_bench_featcal.experts.source import ExpertSource
from fusion_bench_featcal.files import new_file, prepare_directory
from fusion_bench_featcal.settings import CalibrationError

WIDTH = 256
_PART = 2**18  # entries that are shuffled together
_ROUNDING = 1e-9  # of a squared norm: sums may be added in another order
_AGAIN = "Make it by `featcal sketch WORDS --out DIR` with the words of this run"


@cache
def _order() -> Tensor:
    """Places of a part's entries: of a matrix, neighbours and columns go to different sums."""
    return torch.randperm(_PART, generator=torch.Generator().manual_seed(0))


@lru_cache(maxsize=64)
def _signs(part: int) -> Tensor:
    """Signs of a part's entries, other ones for every part."""
    generator = torch.Generator().manual_seed(1 + part)
    return 1.0 - 2.0 * torch.randint(0, 2, (_PART,), generator=generator)


def sketch(tensor: Tensor) -> Tensor:
    """Sums of a tensor's entries with random signs (count sketch): its dot products last.

    The expected product of two sketches is the product of the tensors; a squared distance has a
    relative standard deviation of about `sqrt(2 / 256)`, 9 %.

    Args:
        tensor: Real numbers of any shape, on any device.

    Returns:
        The sketch, `[256]` float32 on the CPU.
    """
    flat, total = tensor.detach().reshape(-1), torch.zeros(WIDTH)
    for number, part in enumerate(flat.split(_PART)):
        signed = part.float().cpu() * _signs(number)[: len(part)]
        placed = torch.zeros(_PART).index_copy_(0, _order()[: len(part)], signed)
        total += placed.view(-1, WIDTH).sum(0)
    return total


def distance(sketch: Tensor, other: Tensor) -> float:
    """Estimate of the squared distance between two tensors from their sketches."""
    return float((sketch - other).square().sum())


def write_sketch_file(folder: Path, expert: str, source: ExpertSource) -> Path:
    """Sketch all tensors of an expert, and write the sketches to `<folder>/<expert>.safetensors`.

    Raises:
        ReportError: If the folder cannot be written.
    """
    sketches = {name: sketch(source.tensor(name)) for name in sorted(source.names())}
    path = prepare_directory(folder, "--out") / f"{expert}.safetensors"
    with new_file(path) as partial:
        save_file(sketches, partial)
    return path


class Sketches:
    """The sketches of one expert."""

    def __init__(self, folder: Path, expert: str) -> None:
        """Read an expert's file in a folder.

        Raises:
            CalibrationError: If it is missing or damaged.
        """
        self._path, self._expert = folder / f"{expert}.safetensors", expert
        try:
            self._sketches = load_file(self._path)
        except (OSError, SafetensorError) as error:
            raise CalibrationError(
                f"method.expert_sketches: {self._path} is missing or damaged. {_AGAIN}"
            ) from error

    def __getitem__(self, name: str) -> Tensor:
        """The sketch of a tensor.

        Raises:
            CalibrationError: If there is none.
        """
        found = self._sketches.get(name)
        if found is None or found.shape != (WIDTH,):
            raise CalibrationError(f"{self._path} has no sketch of {name!r}. {_AGAIN}")
        return found

    def check(self, name: str, tensor: Tensor) -> None:
        """Refuse a tensor that is not the one that was sketched.

        Raises:
            CalibrationError: If it is another.
        """
        now, then = sketch(tensor), self[name]
        if not distance(now, then) <= _ROUNDING * float(then.square().sum()):
            raise CalibrationError(
                f"{self._path} was made from other weights than expert {self._expert!r} has now "
                f"(tensor {name!r}). {_AGAIN}"
            )


class Distances:
    """Distances of experts' tensors from those that would stand in for them."""

    def __init__(
        self,
        sketches: Mapping[str, Sketches],
        merged: Mapping[str, Tensor],
        merge: Callable[[Tensor, list[Tensor]], Tensor] | None,
    ) -> None:
        """Refer to sketches and tensors.

        Args:
            sketches: Task -> sketches of its expert.
            merged: Tensors of the merged model, or of what `merge` begins with.
            merge: A linear upstream merger that has not run yet, of every task's tensors in order.
        """
        self._sketches, self._merged, self._merge = sketches, merged, merge
        self._of_merged: dict[str, Tensor] = {}

    def away(self, task: str, name: str, keys: Mapping[str, str]) -> float:
        """Squared distance of one expert's tensor from the merged one, in the units of weights.

        Args:
            task: The task.
            name: The tensor's name in the merged model.
            keys: Task -> its name in that task's expert.
        """
        if name not in self._of_merged:
            own = sketch(self._merged[name])
            if self._merge is not None:
                own = self._merge(own, [self._sketches[t][key] for t, key in keys.items()])
            self._of_merged[name] = own
        return distance(self._sketches[task][keys[task]], self._of_merged[name])
