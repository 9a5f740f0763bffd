"""Number of tensor operations per block. On a GPU the host starts each one, which bounds a run.

    python benchmarks/operations.py [--models vit-b-32 llama-narrow]
    python benchmarks/operations.py --against ../earlier   # beside an earlier version's checkout

Every operation that torch dispatches counts, views included. Batches are small. Those of 16 images
have the same numbers, larger ones more on a GPU, in strips of Gram matrices. "GPU" is a run on the
CPU in which all tensors name a GPU as their device. It lacks the copies of weights to the GPU.
FeatCal+ tries two ridges instead of six, in the solve, which is not in these numbers.
"""

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from random_models import BATCH, WIDTHS, batches, build
from sides import finish, machine, start
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusion_bench_featcal import FeatCalSettings, Plus, calibrate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kit"))

from posing import CPU, GPU, Posing

NOW, EARLIER = "now", "earlier"
SAMPLES, LENGTH = 4, 32
RULES: dict[str, dict[str, Any]] = {
    "FeatCal": {},
    "FeatCal+": {"rule": Plus(ridges=(0.1, 1.0)), "augment": "none"},
}
PARTS = "per batch and task", "of these in the model's modules", "per task"


class Counted(TorchDispatchMode):
    """Counts operations.

    Attributes:
        numbers: Operations, and those of them inside of the models' modules.
    """

    def __init__(self) -> None:
        """Start with no operation."""
        super().__init__()
        self.numbers, self._depth = [0, 0], 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation."""
        self.numbers[0] += 1
        self.numbers[1] += self._depth > 0
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> "Counted":
        """Count, and follow the calls of modules."""

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return module._call_impl(*args, **kwargs)
            finally:
                self._depth -= 1

        self._calls = patch.object(nn.Module, "__call__", call)
        self._calls.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        """End counting."""
        super().__exit__(*error)
        self._calls.stop()


def operations(name: str, device: str, rule: str, *sizes: int) -> Tensor:
    """Return the operations of a calibration with a number of blocks, tasks and batches."""
    layers, tasks, number = sizes
    base, merged, *experts = models(name, layers, 2 + tasks)
    task_experts = {f"task_{index}": expert for index, expert in enumerate(experts)}
    data = {task: small_batches(name, k, number) for k, task in enumerate(task_experts)}
    options: dict[str, Any] = {"samples_per_task": number * SAMPLES} | RULES[rule]
    if rule == "FeatCal":
        options["calibrate_norm"] = name.startswith("vit")
    settings = FeatCalSettings(**options)
    counted, posing = Counted(), Posing() if device == GPU else nullcontext()
    with posing, counted:
        calibrate(merged, base, task_experts, data, settings, device=device, progress=False)
    return torch.tensor(counted.numbers)


def models(name: str, layers: int, number: int) -> Iterator[Any]:
    """Yield a model, and others near it."""
    model = build(name, layers)
    for _ in range(number):
        yield deepcopy(model)
        for parameter in model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)


def small_batches(name: str, task: int, number: int) -> Iterator[dict[str, Tensor]]:
    """Yield batches of a few samples."""
    for batch in batches(name, task, BATCH * number, LENGTH):
        yield {key: value[:SAMPLES] for key, value in batch.items()}


def per_part(name: str, device: str, rule: str) -> list[int]:
    """Return the operations of an inner block, as `PARTS` names them."""
    operations(name, device, rule, 2, 1, 1)  # what is computed once per process does not count

    def block_tensor(tasks: int, number: int) -> Tensor:
        deep, shallow = (operations(name, device, rule, n, tasks, number) for n in (3, 2))
        return deep - shallow

    few = block_tensor(1, 2)
    batch = block_tensor(1, 3) - few
    task = block_tensor(2, 2) - few - 2 * batch
    return [*batch.tolist(), int(task[0])]


def table(name: str, sides: Mapping[str, Mapping[str, list[int]]]) -> str:
    """Return a Markdown table of one model: a row per rule, device and part."""
    heads = ["rule", "device", "operations", *sides, *(["ratio"] if len(sides) > 1 else [])]
    lines = [f"## {name}\n", f"| {' | '.join(heads)} |", f"|---|---|---|{'--:|' * len(heads[3:])}"]
    for key in next(iter(sides.values())):
        for index, part in enumerate(PARTS):
            values = [side[key][index] for side in sides.values()]
            cells = [*key.split(), part, *map(str, values)]
            cells += [f"{values[-1] / values[0]:.2f}"] if len(values) > 1 else []
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=WIDTHS, default=["vit-b-32", "llama-narrow"])
    parser.add_argument("--against", metavar="CHECKOUT", help="an earlier version's")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        logging.disable(logging.WARNING)  # of modules that stay as merged
        warnings.filterwarnings("ignore", message=".*CUDA is not available")
        devices = {CPU: "CPU", GPU: "GPU"}
        keys = {f"{rule} {devices[device]}": (device, rule) for rule in RULES for device in devices}
        print(json.dumps({key: per_part(options.model, *pair) for key, pair in keys.items()}))
        return
    print(machine())
    for name in options.models:
        paths = {EARLIER: options.against, NOW: ""} if options.against else {NOW: ""}
        sides = {
            side: finish(start("--model", name, env={"PYTHONPATH": path} if path else {}))
            for side, path in paths.items()
        }
        print(f"\n{table(name, sides)}", flush=True)


if __name__ == "__main__":
    main()
