"""Answers of language models, and their scores: match, rank correlation, loss."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from fusion_bench_featcal.data.text_limits import declared, end_tokens
from fusion_bench_featcal.data.text_samples import TextEncoder, pad_rows
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.streams.inputs import to_device

GREEDY: Mapping[str, object] = {
    "do_sample": False, "num_beams": 1, "temperature": None, "top_p": None, "top_k": None,
}  # fmt: skip
"""Arguments of `generate` for greedy search. They override the model's generation settings."""
SAMPLING: Mapping[str, object] = {
    "do_sample": True, "num_beams": 1, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
}  # fmt: skip
"""Arguments of `generate` for answers drawn from the model's own distribution."""

Metric = Literal["exact_match", "spearman"]
METRICS: tuple[Metric, ...] = get_args(Metric)


@torch.no_grad()
def generated_answers(
    model: Any,
    prompts: Sequence[list[int]],
    encoder: TextEncoder,
    most: int,
    search: Mapping[str, object] = GREEDY,
) -> list[list[int]]:
    """Answer prompts. Answers are token ids up to and including an end token.

    Args:
        model: The model.
        prompts: Token ids of `encoder.prompt`, which leave room for the answers.
        encoder: The encoder. An answer ends at the first of its `ends`, of which the model's own
            config may lack some.
        most: Maximum number of tokens of an answer.
        search: `GREEDY` or `SAMPLING`, which uses torch's global random numbers.
    """
    batch = to_device(padded_left(prompts, encoder.pad_id), device_of(model))
    ends: Any = {"pad_token_id": encoder.pad_id, "eos_token_id": sorted(encoder.ends) or None}
    longest = encoder.answer_length(most)
    written = model.eval().generate(**batch, max_new_tokens=longest, **search, **ends)
    first = 1 if encoder.is_encoder_decoder else batch["input_ids"].shape[1]
    return [encoder.until_end(row[first:].tolist()) for row in written]


def padded_left(prompts: Sequence[list[int]], pad_id: int) -> dict[str, Tensor]:
    """Return token ids and attention mask, `[batch, length]` int64, padded on the left."""
    mask = pad_rows([[1] * len(prompt) for prompt in prompts], 0, left=True)
    return {"input_ids": pad_rows(prompts, pad_id, left=True), "attention_mask": mask}


def answer_texts(
    model: object, encoder: TextEncoder, prompts: Sequence[list[int]], *, batch_size: int, most: int
) -> list[str]:
    """Answer prompts greedily, batch by batch.

    An answer does not depend on the other prompts of its batch. Prompts in order of their length
    are padded least.
    """
    answers: list[str] = []
    for start in range(0, len(prompts), batch_size):
        written = generated_answers(model, prompts[start : start + batch_size], encoder, most)
        texts = encoder.tokenizer.batch_decode(written, skip_special_tokens=True)
        answers += [text.strip() for text in texts]
    return answers


def logits_and_targets(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return logits `[batch, positions, vocabulary]` and their target tokens, -100 for none.

    For texts without `labels`, all tokens are targets. Targets of an encoder-decoder are the tokens
    that greedy search chooses: neither a forced first token nor tokens after the end.
    """
    if model.config.is_encoder_decoder:
        labels = batch["labels"]
        ends = torch.tensor(sorted(end_tokens(model)), device=labels.device)
        is_end = torch.isin(labels, ends).long()
        is_forced = is_end.cumsum(dim=1) > is_end
        if (start := declared("forced_bos_token_id", model)) is not None:
            is_forced[:, 0] |= labels[:, 0] == start
        return model(**batch).logits, labels.masked_fill(is_forced, NO_TARGET)
    inputs = dict(batch)
    labels = inputs.pop("labels", None)
    if labels is None:
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, NO_TARGET)
    logits = model(**inputs).logits
    return logits[:, :-1], labels[:, 1:]


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of each row's target tokens, `[batch]`, float32."""
    losses = F.cross_entropy(
        logits.float().transpose(1, 2), labels, ignore_index=NO_TARGET, reduction="none"
    )
    return losses.sum(dim=1) / (labels != NO_TARGET).sum(dim=1).clamp(min=1)


def spearman(answers: Sequence[str], targets: Sequence[str]) -> float:
    """Return Spearman's rank correlation of two lists of numbers as texts, in -1..1.

    A text that is not a number counts as 0. The correlation with a constant list is 0 (in
    FusionBench it is NaN).
    """
    from scipy import stats  # slow to import

    numbers = [[_number(text) for text in texts] for texts in (answers, targets)]
    if any(len(set(values)) == 1 for values in numbers):
        return 0.0
    spearmanr: Any = stats.spearmanr
    return float(spearmanr(*numbers).statistic)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
