"""What language models answer to prompts, and how well they know the right answers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_bench_featcal.calibration_text import greedy_answers
from fusion_bench_featcal.text_samples import IGNORED, Sample, TextEncoder, pad_samples


def answer_texts(
    model: Any, encoder: TextEncoder, prompts: Sequence[list[int]], *, batch_size: int, most: int
) -> list[str]:
    """Answer prompts greedily, those of similar length together.

    The answer to a prompt does not depend on what else is in its batch.

    Args:
        model: A transformers model with `generate`.
        encoder: Its tokenizer and kind.
        prompts: Token ids of each prompt, without padding.
        batch_size: Prompts answered together.
        most: Longest answer in tokens.

    Returns:
        The answers in the prompts' order, without special tokens and blanks at either end.
    """
    answers = [""] * len(prompts)
    for rows in _by_length([len(prompt) for prompt in prompts], batch_size):
        written = greedy_answers(model, [prompts[row] for row in rows], encoder, most)
        texts = encoder.tokenizer.batch_decode(written, skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            answers[row] = text.strip()
    return answers


@torch.no_grad()
def target_loss(
    model: Any, encoder: TextEncoder, samples: Sequence[Sample], *, batch_size: int
) -> float:
    """Measure how well a model knows the right answers.

    Args:
        model: A transformers model.
        encoder: Its tokenizer and kind.
        samples: Prompts with their targets.
        batch_size: Samples that run through the model together.

    Returns:
        The mean over samples of each target's mean cross-entropy per token, in nats.
    """
    device = next(model.parameters()).device
    total = 0.0
    for rows in _by_length([len(sample.ids) for sample in samples], batch_size):
        batch = pad_samples([samples[row] for row in rows], encoder)
        losses = _row_losses(model, {name: tensor.to(device) for name, tensor in batch.items()})
        total += losses.sum().item()
    return total / len(samples)


def _row_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of each row's target tokens, `[batch]`, float32."""
    labels = batch["labels"]
    if model.config.is_encoder_decoder:
        logits = model(**batch).logits
    else:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits, labels = model(**inputs).logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
    )
    return losses.sum(dim=1) / (labels != IGNORED).sum(dim=1).clamp(min=1)


def _by_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return (order[start : start + batch_size] for start in range(0, len(order), batch_size))
