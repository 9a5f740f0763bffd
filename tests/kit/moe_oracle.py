"""Experts of mixtures, read where either release of transformers stores them."""

from typing import Any

from torch import Tensor, nn

NAMES: dict[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}


def find_mixture(model: nn.Module, block: str) -> str:
    """Name of the module in a block that has a router and experts; empty if there is none."""
    inside = model.get_submodule(block).named_modules(prefix=block)
    return next((name for name, m in inside if hasattr(m, "gate") and hasattr(m, "experts")), "")


def matrix(model: nn.Module, mixture: str, number: int, part: str) -> Tensor:
    """One expert's matrix, `[out, in]`, where the model stores it."""
    experts: Any = model.get_submodule(mixture).experts
    if hasattr(experts, "gate_up_proj"):
        both = experts.gate_up_proj.data[number].chunk(2)
        return experts.down_proj.data[number] if part == "down" else both[part == "up"]
    expert = experts[number]
    name = NAMES[part] if hasattr(expert, NAMES[part]) else f"{part}_proj"
    return getattr(expert, name).weight.data
