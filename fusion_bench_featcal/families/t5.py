"""T5 (FLAN-T5, mT5, UMT5), whose blocks pass on a bias of their positions."""

import inspect
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.families.base import hidden_output
from fusion_bench_featcal.families.encoder_decoder import EncoderDecoder
from fusion_bench_featcal.families.stack import StackCall

BIAS, ATTENTION_MASK = "position_bias", "attention_mask"
"""Arguments of T5's blocks."""


@dataclass(frozen=True)
class T5Call(StackCall):
    """Input of the next block.

    Attributes:
        bias: Position bias of the stage, `[1, heads, positions, positions]`. None before its first
            block has run, and if every block has its bias.
        adds_mask: Whether blocks expect the mask inside the bias, as in transformers 4.57. That
            bias is different for each sample and too large to keep, so it is built for each block.
    """

    bias: Tensor | None = None
    adds_mask: bool = False


class T5Family(EncoderDecoder):
    """A stage's first block computes its position bias, which the later ones receive.

    In UMT5 every block computes one. Embeddings, position biases, RMS norms and heads keep their
    merged weights.
    """

    entries = 3

    def begin(self, model: nn.Module, inputs: Any, block: str, ended: Any = None) -> T5Call:
        """Run the model up to a stage. All arguments of its blocks are by name."""
        call = super().begin(model, inputs, block, ended)
        _, *names = inspect.signature(model.get_submodule(block).forward).parameters
        kwargs = {
            name: dict(zip(names, args, strict=False)) | dict(call.kwargs[name])
            for name, args in call.args.items()
        }
        return T5Call(call.hidden, dict.fromkeys(kwargs, ()), kwargs, outputs=call.outputs)

    def step(self, model: nn.Module, block: str, call: Any) -> T5Call:
        """Run one block. A stage's first block passes on the position bias, if blocks share it."""
        bias, kwargs, more = call.bias, call.kwargs[block], dict[str, Tensor]()
        if bias is not None:
            more[BIAS] = bias + kwargs[ATTENTION_MASK] if call.adds_mask else bias
        output = self.output_of(model, block, call, **more)
        after = replace(call, hidden=hidden_output(output))
        if bias is not None or BIAS not in kwargs:
            return after
        bias = output[1]
        if len(bias) == 1:
            return replace(after, bias=bias)
        module: Any = model.get_submodule(block)
        attention = module.layer[0].SelfAttention
        bias = attention.compute_bias(*bias.shape[-2:], device=bias.device)  # without the mask
        return replace(after, bias=bias, adds_mask=True)


T5 = T5Family(name="t5", compared=False)
