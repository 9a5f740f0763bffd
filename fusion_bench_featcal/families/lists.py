"""Lists of blocks in a model: its only one, those of encoder and decoder, or of several towers."""

from typing import Any

from torch import nn

_CLEARLY = 10
"""Size ratio to all other lists above which a list counts as the model's blocks."""


def find_stages(model: nn.Module) -> list[list[str]]:
    """Return the names of a model's blocks, one list per stage, or nothing if they are not clear.

    An encoder-decoder of transformers has two stages. A model with several towers has that of its
    text decoder. Any other model has the list of `find_stack`.

    Args:
        model: The model. It may be on the meta device.
    """
    if is_encoder_decoder(model):
        parts = _part(model, "get_encoder"), _part(model, "get_decoder")
        stages = [_largest_list(part) for part in parts]
        return _names_in(model, stages) if all(stages) else []
    if text_tower(model) is not None:
        return _names_in(model, [_largest_list(_part(model, "get_decoder"))])
    stack = find_stack(model)
    return [stack] if stack else []


def find_stack(model: nn.Module) -> list[str]:
    """Return names of a model's blocks, or nothing if no list of modules clearly dominates.

    This is the outermost list of several modules, if it has ten times the parameters of all other
    such lists together.

    Args:
        model: The model. It may be on the meta device.
    """
    sizes = {blocks: _size(blocks) for blocks in outermost_lists(model)}
    largest = max(sizes, key=lambda blocks: sizes[blocks], default=None)
    if largest is None or not sizes[largest]:
        return []
    if _CLEARLY * (sum(sizes.values()) - sizes[largest]) > sizes[largest]:
        return []
    return _names_in(model, [[*largest.children()]])[0]


def is_encoder_decoder(model: nn.Module) -> bool:
    """Return whether a model of transformers has an encoder whose output its decoder attends to."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def text_tower(model: nn.Module) -> str | None:
    """Return the name of the text decoder beside towers for images or sounds, if there are any."""
    decoder = _part(model, "get_decoder")
    if decoder is model or is_encoder_decoder(model) or not other_towers(model):
        return None
    if not _largest_list(decoder):
        return None
    return next(name for name, module in model.named_modules() if module is decoder)


def other_towers(model: nn.Module) -> list[nn.Module]:
    """Return the lists of blocks outside a model's decoder."""
    inside = {*_part(model, "get_decoder").modules()}
    return [blocks for blocks in outermost_lists(model) if blocks not in inside]


def outermost_lists(model: nn.Module, least: int = 2) -> list[nn.Module]:
    """Return lists of at least so many blocks, which are in no other such list.

    Blocks have one class, or are layers of transformers (Jamba has two classes of them).
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    lists = dict[str, nn.Module]()
    for name, module in model.named_modules():
        if not name or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        kinds = [type(child) for child in module.children()]
        inside = any(name.startswith(f"{outer}.") for outer in lists)
        alike = len({*kinds}) == 1 and kinds[0] is not nn.ModuleList
        alike = alike or all(issubclass(kind, GradientCheckpointingLayer) for kind in kinds)
        if len(kinds) >= least and alike and not inside:
            lists[name] = module
    return [*lists.values()]


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the output embeddings of a language model, or None for other models."""
    find: Any = getattr(model, "get_output_embeddings", lambda: None)
    return find()


def _largest_list(part: nn.Module) -> list[nn.Module]:
    """Return the blocks of the largest of a module's outermost lists, which may have one block."""
    largest = max(outermost_lists(part, least=1), key=_size, default=None)
    return [] if largest is None else [*largest.children()]


def _size(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())


def _part(model: nn.Module, getter: str) -> nn.Module:
    """Return what a model of transformers gives as its encoder or decoder, or the model."""
    find: Any = getattr(model, getter, lambda: model)
    try:
        return find() or model
    except (AttributeError, NotImplementedError):
        return model


def _names_in(model: nn.Module, stages: list[list[nn.Module]]) -> list[list[str]]:
    names = {module: name for name, module in model.named_modules()}
    return [[names[block] for block in stage] for stage in stages]
