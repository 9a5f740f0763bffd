"""The correction of one task's final feature, whichever method fitted it."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from fusion_bench_featcal.baselines.checkpoint import task_key
from fusion_bench_featcal.baselines.ridge_surgery import AffineModule
from fusion_bench_featcal.baselines.surgery import SurgeryModule
from fusion_bench_featcal.settings import CalibrationError

Correction = SurgeryModule | AffineModule


def correction_of(corrections: nn.ModuleDict, tasks: Sequence[str], task: str | None) -> Correction:
    """One task's correction.

    Args:
        corrections: Task key -> correction.
        tasks: The tasks' names.
        task: The task's name.

    Returns:
        Its correction.

    Raises:
        CalibrationError: If there is none.
    """
    if task not in tasks:
        raise CalibrationError(
            f"there is no feature correction for task {task!r}: surgery methods must be told "
            f"the task, and correct those they were fitted on: {', '.join(tasks)}"
        )
    return corrections[task_key(task)]  # type: ignore[return-value]


def correction_from(part: Mapping[str, Tensor], task: str, stem: str) -> Correction:
    """A correction from its saved tensors.

    Args:
        part: Name -> tensor.
        task: The task's name, for the message.
        stem: Name of the file, for the message.

    Returns:
        The correction.

    Raises:
        CalibrationError: If the tensors are of no known kind.
    """
    if set(part) == {"down", "up"}:
        return SurgeryModule(part["down"], part["up"])
    if set(part) == {"matrix", "shift"}:
        return AffineModule(part["matrix"], part["shift"])
    raise CalibrationError(f"{stem}.safetensors has no correction for task {task!r}")
