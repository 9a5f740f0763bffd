"""Lists of blocks in a model, found by the model's structure."""

from torch import nn

from fusion_bench_featcal.errors import CalibrationError

_CLEARLY = 10
"""Size ratio to all other lists above which a list counts as the model's blocks."""


def find_stack(model: nn.Module) -> str | None:
    """Return the name of the list with a model's blocks.

    This is the outermost list of several modules of one class, if it has ten times the parameters
    of all other such lists together. Two towers, or an encoder and a decoder, have no such list.

    Args:
        model: The model. It may be on the meta device.

    Returns:
        The list's name, or None if no list clearly dominates.
    """
    stacks = _stacks(model)
    largest = max(stacks, key=lambda name: stacks[name], default=None)
    if largest is None or _CLEARLY * (sum(stacks.values()) - stacks[largest]) > stacks[largest]:
        return None
    return largest


def no_stack(model: nn.Module, family: str) -> CalibrationError:
    """Return the error for a model without a single list of blocks, with advice."""
    return CalibrationError(
        f"method.family={family}: {type(model).__name__} has no list of modules of one class that "
        "clearly holds its blocks. Write a family (docs/tutorials/family.md)"
    )


def _stacks(model: nn.Module) -> dict[str, int]:
    """Return name -> number of parameters of every outermost list of modules of one class."""
    stacks: dict[str, int] = {}
    for name, module in model.named_modules():
        kinds = [type(child) for child in module.children()]
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        alike = len(kinds) > 1 and len(set(kinds)) == 1 and kinds[0] is not nn.ModuleList
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and alike and not inside:
            stacks[name] = sum(p.numel() for p in module.parameters())
    return {name: size for name, size in stacks.items() if size}
