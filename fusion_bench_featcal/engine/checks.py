"""Deferred checks of values on the device: one host-device synchronisation runs them all."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fusion_bench_featcal.core.finite import is_sound, not_finite, read_back
from fusion_bench_featcal.settings import CalibrationError


class DeferredCheck(NamedTuple):
    """A scalar on the device that must be 0, and the error to raise if it is not."""

    failed: Tensor
    error: CalibrationError


def run_checks(checks: Sequence[DeferredCheck], further: Sequence[Tensor] = ()) -> list[float]:
    """Run all checks, and read other numbers with them, in one synchronisation.

    Args:
        checks: The checks, in the order in which their errors count.
        further: Scalars of the same device.

    Returns:
        The further numbers.

    Raises:
        CalibrationError: The error of the first failed check.
    """
    values = read_back([*(check.failed for check in checks), *further])
    for check, value in zip(checks, values, strict=False):
        if value != 0:
            raise check.error
    return values[len(checks) :]


def refuse_not_finite(
    model: nn.Module, label: str, advice: str, sources: Iterable[Callable[[str], object]] = ()
) -> None:
    """Refuse a model with NaN or infinity in a parameter, or NaN in a persistent buffer.

    Args:
        model: The model, its tensors on one device.
        label: Its name in the message.
        advice: End of the message if no source has such values in that tensor.
        sources: Readers of the models that it was made of. Each takes a tensor's name and raises a
            `CalibrationError` if its own tensor of that name is not finite; unknown names pass.

    Raises:
        CalibrationError: Naming the tensor and the model that brought it.
    """
    parameters = {id(parameter) for parameter in model.parameters()}
    stored = model.state_dict(keep_vars=True)
    tensors = {name: t.detach() for name, t in stored.items() if t.is_floating_point()}
    signs = read_back([not_finite(tensor) for tensor in tensors.values()])
    for (name, tensor), sign in zip(tensors.items(), signs, strict=True):
        if sign and not is_sound(tensor, is_parameter=id(stored[name]) in parameters):
            for read in sources:
                read(name)
            raise CalibrationError(f"{label}: tensor {name!r} has NaN or infinite values. {advice}")
