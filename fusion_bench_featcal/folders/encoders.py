"""Heads of text encoders: embeddings of each task's class names."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.embeddings import Pooling, class_logits, embed_texts
from fusion_bench_featcal.data.text_samples import TextEncoder


class NameHeads:
    """Frozen heads, embedded by one model for all tasks at the first evaluation."""

    def __init__(
        self, load: Callable[[], nn.Module], pooling: Pooling, encoder: TextEncoder
    ) -> None:
        """Prepare heads without loading the model.

        Args:
            load: Loads the model that embeds class names.
            pooling: How tokens become an embedding.
            encoder: Converts texts to token ids.
        """
        self._load, self._pooling, self._encoder = load, pooling, encoder
        self._texts: dict[str, list[str]] = {}

    def add(
        self, task: str, names: Sequence[str], prompt: str
    ) -> Callable[[Any, Mapping[str, Tensor]], Tensor]:
        """Add a task's class names, and return its function from model and batch to logits."""
        self._texts[task] = [prompt.replace("{}", name) for name in names]
        return partial(self._logits, task)

    @cached_property
    def _heads(self) -> dict[str, Tensor]:
        model, texts = self._load(), self._texts.items()
        return {t: embed_texts(model, self._pooling, self._encoder, names) for t, names in texts}

    def _logits(self, task: str, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        return class_logits(self._pooling.features(model, batch), self._heads[task])
