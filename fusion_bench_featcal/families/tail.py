"""Models whose blocks are in one list, and linear modules behind them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import (
    Call,
    Family,
    call_model,
    run_block,
    stop_forward,
    stoppable,
)
from fusion_bench_featcal.families.skipping import Passed, skipping
from fusion_bench_featcal.families.stack import Stack


@dataclass(frozen=True)
class TailCall(Call):
    """Input of a module behind the blocks.

    Attributes:
        outputs: Outputs of the last block and of the modules behind it that ran before.
    """

    outputs: Mapping[str, Tensor] = field(default_factory=dict)


class StackWithTail(Family):
    """Blocks in one list, then modules behind them, one after another.

    Each of these is a stage, because other weights may lie between them, such as those of a norm.
    They may be anywhere in the model: what they receive is computed from the outputs of the last
    block and of all modules before.
    """

    def __init__(self, blocks: Sequence[str], tail: Sequence[str]) -> None:
        """Set the names of both in the order of their calls."""
        self.body, self.blocks, self.tail = Stack(blocks), [*blocks], [*tail]

    def stages(self, model: nn.Module) -> list[list[str]]:
        """Return the blocks as one stage, and a stage for each module behind them."""
        return [*self.body.stages(model), *([name] for name in self.tail)]

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> Any:
        """Run the model up to a block. Those of earlier stages have known outputs."""
        if ended is None:
            return self.body.begin(model, inputs, block)
        before, calls = [*self.blocks, *self.tail[: self.tail.index(block)]], list[Call]()
        outputs = {**getattr(ended, "outputs", {}), before[-1]: ended.hidden}

        def output(name: str, call: Call) -> Tensor:
            if name == block:
                calls.append(call)
                raise stop_forward()
            known = outputs.get(name, call.hidden).clone()
            return known.as_subclass(Passed) if name in self.blocks else known

        with skipping(model, [*before, block], output), stoppable():
            call_model(model, inputs)
        return TailCall(calls[0].hidden, outputs=outputs)

    def step(self, model: nn.Module, block: str, call: Any) -> Any:
        """Run one block, or one module behind them."""
        if block in self.blocks:
            return self.body.step(model, block, call)
        return replace(call, hidden=run_block(model, block, call))

    def reads_first(self, model: nn.Module, inputs: Any) -> bool:
        """Return whether the output depends on the first position of the last block alone."""
        return self.body.reads_first(model, inputs)
