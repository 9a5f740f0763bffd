"""Checks of values on the device: the host asks for all of them at once, once a block."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from fusion_bench_featcal.core.finite import is_sound, not_finite, read_back
from fusion_bench_featcal.settings import CalibrationError


class Doubt(NamedTuple):
    """A scalar that ends the run, with an error, unless it is 0."""

    sign: Tensor
    error: CalibrationError


def refuse_doubtful(doubts: Sequence[Doubt], further: Sequence[Tensor] = ()) -> list[float]:
    """Look at all doubts at once, and at other numbers with them.

    Args:
        doubts: The doubts, in the order in which they count.
        further: Scalars of the same device.

    Returns:
        The further numbers.

    Raises:
        CalibrationError: The first doubt's that is founded.
    """
    values = read_back([*(doubt.sign for doubt in doubts), *further])
    for doubt, value in zip(doubts, values, strict=False):
        if value != 0:
            raise doubt.error
    return values[len(doubts) :]


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
