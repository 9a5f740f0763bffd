"""Lists of blocks in a model, found by the model's structure."""

from torch import nn

from fusion_bench_featcal.settings import CalibrationError

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
    largest = _largest(stacks, "")
    if not largest or _CLEARLY * (sum(stacks.values()) - stacks[largest]) > stacks[largest]:
        return None
    return largest


def suggested_families(model: nn.Module) -> list[str]:
    """Return values of `method.family` that may fit a model with several lists of blocks.

    Args:
        model: The model. It may be on the meta device.

    Returns:
        Values in command line syntax, the most promising first, or none without lists of blocks.
    """
    stacks = _stacks(model)
    sides = [_largest(stacks, part) for part in ("encoder", "decoder")]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and all(sides):
        blocks = ", ".join(f"[{name}.*]" for name in sides)
        masks = "[attention_mask, decoder_attention_mask]"
        return [f"{{name: replay, blocks: [{blocks}], mask: {masks}}}"]
    by_size = sorted(stacks, key=lambda name: -stacks[name])
    return [f"{{name: replay, blocks: [{name}.*]}}" for name in by_size[:2]]


def no_stack(model: nn.Module, family: str) -> CalibrationError:
    """Return the error for a model without a single list of blocks, with advice."""
    tries = " or ".join(f"method.family={value}" for value in suggested_families(model))
    advice = f"Try {tries}" if tries else "Name its blocks: method.family={name: replay, blocks: }"
    return CalibrationError(
        f"method.family={family}: {type(model).__name__} has no list of modules of one class that "
        f"clearly holds its blocks. {advice}"
    )


def _largest(stacks: dict[str, int], part: str) -> str:
    """Return the stack with the most parameters within a part of the model."""
    below = {name: size for name, size in stacks.items() if part in ("", *name.split("."))}
    return max(below, key=lambda name: below[name]) if below else ""


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
