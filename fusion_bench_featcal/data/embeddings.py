"""Embeddings of encoders: pooled token states, and their cosines with a frozen head."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TEMPERATURE = 0.05

Mode = Literal["mean", "cls", "last", "max"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Pooling:
    """Pools an encoder's token states to one embedding of an input.

    Attributes:
        mode: `mean` or `max` over the tokens, or the state of the `cls` (first) or `last` token.
        max_length: Maximum number of tokens of a text, or None.
    """

    mode: Mode = "mean"
    max_length: int | None = None

    def features(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return the embeddings `[batch, d]` of a model's inputs, not normalised, in float32."""
        states = model(**inputs).last_hidden_state.float()
        mask = inputs.get("attention_mask")
        if self.mode == "mean":
            return token_mean(states, mask)
        if mask is None:  # images
            mask = torch.ones(states.shape[:2], device=states.device)
        if self.mode == "max":
            return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(dim=1)
        # padding may be on either side
        first, after_last = mask.int().argmax(1), mask.shape[1] - mask.int().flip(1).argmax(1)
        positions = first if self.mode == "cls" else after_last - 1
        return states[torch.arange(len(states)), positions]


def token_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean `[batch, d]` of states `[batch, tokens, d]` over tokens.

    Padding has 0 in the mask `[batch, tokens]`. Without a mask all tokens count.
    """
    if mask is None:
        return states.mean(1)
    return torch.einsum("btd,bt->bd", states, mask.float()) / mask.sum(1, keepdim=True)


def class_logits(features: Tensor, head: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return cosines of embeddings `[batch, d]` and a head `[classes, d]` over the temperature.

    Rows of the head have norm 1.
    """
    return F.normalize(features, dim=-1) @ head.to(features).T / temperature
