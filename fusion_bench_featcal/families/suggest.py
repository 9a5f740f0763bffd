"""Settings to try for a model whose type no family knows, read off the model's structure."""

import re

from torch import nn

_LIKE_LLAMA = re.compile(r"(model\.)?layers\.\*")


def suggested_families(model: nn.Module) -> list[str]:
    """Values of `method.family` that may fit a model, the most promising first.

    Args:
        model: The model; on the meta device it will do.

    Returns:
        Values as they are typed; empty where nothing in the model is repeated.
    """
    stacks = _stacks(model)
    sides = [_largest(stacks, part) for part in ("encoder", "decoder")]
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and all(sides):
        blocks = ", ".join(f"[{pattern}]" for pattern in sides)
        masks = "[attention_mask, decoder_attention_mask]"
        return [f"{{name: replay, blocks: [{blocks}], mask: {masks}}}"]
    pattern = _largest(stacks, "")
    if not pattern:
        return []
    like_llama = ["llama"] if _LIKE_LLAMA.fullmatch(pattern) else []
    return [*like_llama, f"{{name: replay, blocks: [{pattern}]}}"]


def _largest(stacks: dict[str, int], part: str) -> str:
    """Pattern of the stack with the most parameters among those below a part of the model."""
    below = {name: size for name, size in stacks.items() if part in ("", *name.split("."))}
    return max(below, key=lambda name: below[name]) if below else ""


def _stacks(model: nn.Module) -> dict[str, int]:
    """Pattern -> parameters of every outermost list of modules of one class."""
    stacks: dict[str, int] = {}
    for name, module in model.named_modules():
        children = list(module.children())
        inside = any(name.startswith(outer.removesuffix("*")) for outer in stacks)
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if isinstance(module, nn.ModuleList | nn.Sequential) and alike and not inside:
            stacks[f"{name}.*" if name else "*"] = sum(p.numel() for p in module.parameters())
    return stacks
