"""Two plain merges, and what a suite's measurements have in common."""

import platform
from collections.abc import Iterable

import torch
import transformers
from torch import Tensor

TASK_ARITHMETIC_SCALE = 0.3

Weights = dict[str, Tensor]
Accuracies = dict[str, float]


def plain_merges(base: Weights, experts: Iterable[Weights]) -> dict[str, Weights]:
    """Merge experts by their plain mean and by task arithmetic.

    Args:
        base: the base's tensors by name.
        experts: each expert's, with the same names.

    Returns:
        `simple_average` and `task_arithmetic` (scale 0.3), in the base's dtypes.
    """
    experts = list(experts)
    # sums in float64: the order of the tasks then makes no difference that anyone could see
    change = {
        name: sum(expert[name].double() - value.double() for expert in experts)
        for name, value in base.items()
    }

    def moved(scale: float) -> Weights:
        return {n: (v.double() + scale * change[n]).to(v.dtype) for n, v in base.items()}

    return {
        "simple_average": moved(1 / len(experts)),
        "task_arithmetic": moved(TASK_ARITHMETIC_SCALE),
    }


def with_average(row: Accuracies) -> Accuracies:
    """Return the row with its plain mean added under ``average``."""
    return {**row, "average": sum(row.values()) / len(row)}


def versions() -> dict[str, str]:
    """Return the versions a suite was built with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
