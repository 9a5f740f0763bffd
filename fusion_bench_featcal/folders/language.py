"""Tasks of language models: prompts with targets, chats, or plain texts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fusion_bench_featcal.calibration_text import TextBatches
from fusion_bench_featcal.data.text_formats import FORMATS, lacks_answer
from fusion_bench_featcal.data.text_samples import IGNORED, TextEncoder
from fusion_bench_featcal.folders.columns import open_texts
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Part, Score, Task, open_parts, sentence

LONG = 16
"""Median tokens of targets from which accuracy counts tokens in place of whole answers."""


def open_language_task(
    task: str, request: Request, encoder: TextEncoder, load_expert: Callable[[], nn.Module]
) -> Task:
    """Open a task's texts, and read those that are used.

    Args:
        task: The task.
        request: The request.
        encoder: Makes token ids.
        load_expert: Loads the task's expert, called where it writes the targets.

    Raises:
        ValueError: If there is no such data.
        CalibrationError: If a row is no text that can be used.
    """
    columns, names = request.columns_of(task), ("prompt", "target", "messages", "text")
    open_rows = partial(open_texts, columns=columns, names=names, usual=FORMATS)
    used, held = open_parts(task, request, open_rows)

    def batches(part: Part) -> TextBatches:
        settings = request.settings
        places = [(index, f"{part.place}, item {index}") for index in part.indices]
        lacking = [place for index, place in places if lacks_answer(part.rows[index], place)]
        if 0 < len(lacking) < len(places):
            raise ValueError(
                f"{lacking[0]}: no target, as in {len(lacking)} of {len(places)} rows. Leave "
                "these rows out, or leave out all targets, so that the expert writes them"
            )
        if lacking:
            settings = settings.replace(calibration_targets="generated")
        return TextBatches(*part, settings, encoder, load_expert, request.device)

    calibration = batches(used)
    length = max(calibration.lengths())
    tests = LanguageTests(batches(held)) if held.indices else None
    measure = "" if tests is None else tests.measure()
    notes = [sentence(task, request, used, held, measure)]
    if calibration.settings.calibration_targets == "generated":
        notes.append(f"{task}: no targets in --data, so its expert writes them")
    return Task(calibration, len(used.indices), length, tests, notes)


@dataclass
class LanguageTests:
    """Test texts, scored by the probability of their targets.

    A target is answered exactly if each of its tokens is the model's first choice after those
    before it: greedy search would then write it. So no search is needed.
    """

    batches: TextBatches

    def measure(self) -> str:
        """Read all texts, and say of what accuracy is the share."""
        self.batches.lengths()
        written = self.batches.settings.calibration_targets == "generated"
        whose = " that its expert writes" if written else ""
        return f"{'tokens' if self._counts_tokens else 'whole answers'}{whose} that are right"

    @cached_property
    def _counts_tokens(self) -> bool:
        """Return whether targets are too long to be answered as a whole, or are free text."""
        if self.batches.settings.calibration_targets == "generated":
            return True
        labels = [
            self.batches.encoder.sample(self.batches.rows[index], "").labels
            for index in self.batches.indices
        ]
        lengths = [sum(token != IGNORED for token in row) if row else LONG + 1 for row in labels]
        return median(lengths) > LONG

    @torch.no_grad()
    def score(self, model: nn.Module) -> Score:
        """Score a model by its loss a token, mean over texts, and by accuracy."""
        device = next(model.parameters()).device
        losses, tokens, exact = [], [0, 0], []
        choices, kind = 0, "text"
        for batch in self.batches.checked(model):
            moved = {name: tensor.to(device) for name, tensor in batch.items()}
            logits, labels = targets_of(model, moved)
            choices, kind = logits.shape[-1], "answer" if "labels" in batch else "text"
            counted = labels != IGNORED
            loss = F.cross_entropy(
                logits.float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
            )
            losses.append(loss.sum(dim=1) / counted.sum(dim=1).clamp(min=1))
            right = (logits.argmax(dim=-1) == labels) | ~counted
            tokens[0] += int((right & counted).sum())
            tokens[1] += int(counted.sum())
            exact.append(right.all(dim=1))
        correct = None if self._counts_tokens else torch.cat(exact).cpu()
        share = tokens[0] / max(tokens[1], 1) if correct is None else correct.double().mean().item()
        return Score(share, torch.cat(losses).double().cpu(), correct, choices, kind)


def targets_of(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits and the tokens that they predict, -100 where none counts.

    Args:
        model: A language model.
        batch: `input_ids`, `attention_mask` and, where texts have targets, `labels`,
            `[batch, length]`; texts without count as a whole.

    Returns:
        Logits `[batch, positions, vocabulary]` and labels `[batch, positions]`.
    """
    if model.config.is_encoder_decoder:
        return model(**batch).logits, batch["labels"]
    ids, mask = batch["input_ids"], batch["attention_mask"]
    labels = batch.get("labels")
    if labels is None:
        labels = ids.masked_fill(mask == 0, IGNORED)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return logits[:, :-1], labels[:, 1:]
