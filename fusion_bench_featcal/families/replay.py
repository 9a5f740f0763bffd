"""The family for any model: blocks named by patterns, run by replaying the model's own forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import call_model, hidden_output, stop_forward, stoppable
from fusion_bench_featcal.settings import CalibrationError


@dataclass(frozen=True)
class ReplayFamily:
    """Runs every block inside the model's own forward pass, so that nothing is assumed about it.

    Each block costs a forward pass up to it: `L/2` times the work of a family that can run a block
    alone, for `L` blocks, with whole experts in memory. Right for any architecture whose blocks run
    once each and one after another.

    Attributes:
        blocks: Patterns of block names, matched part by part: `transformer.h.*` names
            `transformer.h.0` but not what is inside it.
        mask: Name of the input that is 1 where a position counts and 0 for padding,
            `[batch, positions]`. None: `attention_mask` where the inputs have it, else all count.
    """

    blocks: Sequence[str]
    mask: str | None = None
    name: str = "replay"
    whole_model: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.blocks, str) or not self.blocks:
            raise ValueError(
                "method.family.blocks must be a list of block name patterns, such as "
                f"[transformer.h.*], got {self.blocks!r}"
            )

    def stages(self, model: nn.Module) -> list[list[str]]:
        """The matching modules in order of registration, as one stage.

        Raises:
            CalibrationError: If a pattern matches nothing.
        """
        names = [name for name, _ in model.named_modules() if name]
        for pattern in self.blocks:
            if not any(_matches(name, pattern) for name in names):
                raise CalibrationError(
                    f"method.family.blocks: {pattern!r} matches no module of "
                    f"{type(model).__name__}; its top modules are "
                    f"{[name for name, _ in model.named_children()]}"
                )
        return [[name for name in names if any(_matches(name, p) for p in self.blocks)]]

    def begin(self, model: nn.Module, inputs: Any, first_block: str) -> Any:
        """Nothing runs yet: the model's inputs are what every replay starts from."""
        return inputs

    def step(self, model: nn.Module, block: str, call: Any) -> tuple[Tensor, Any]:
        """Run the model up to and including the block.

        Raises:
            CalibrationError: If blocks run in another order than listed, or not once each.
        """
        expected = self.stages(model)[0]
        expected = expected[: expected.index(block) + 1]
        called: list[str] = []
        output: list[Any] = []

        def finish(_: nn.Module, __: Any, result: Any) -> None:
            output.append(result)
            raise stop_forward()

        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda *_, name=name: called.append(name)
            )
            for name in self.stages(model)[0]
        ]
        handles.append(model.get_submodule(block).register_forward_hook(finish))
        try:
            with stoppable():
                call_model(model, call)
        finally:
            for handle in handles:
                handle.remove()
        if called != expected or not output:
            raise CalibrationError(
                f"method.family.blocks: up to {block} the model runs {called}, but the blocks "
                f"listed are {expected}; each must run once, in this order"
            )
        return hidden_output(output[0]), call

    def row_weights(self, inputs: Any) -> Tensor | None:
        """The inputs' mask, where they have one.

        Raises:
            CalibrationError: If the named mask is missing, or a mask cannot tell padding: padding
                would count.
        """
        named = inputs if isinstance(inputs, Mapping) else {}
        mask = named.get(self.mask or "attention_mask")
        if mask is None:
            if self.mask is None:
                return None
            raise CalibrationError(
                f"method.family.mask: the model's inputs have no {self.mask!r}; they are "
                f"{sorted(named) or type(inputs).__name__}"
            )
        if not isinstance(mask, Tensor) or mask.ndim != 2:
            shape = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise CalibrationError(
                f"method.family.mask: {self.mask or 'attention_mask'!r} is {shape}, but padding is "
                "told by a mask [batch, positions]; give one, or rename this input"
            )
        return mask


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
