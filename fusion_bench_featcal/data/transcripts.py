"""Scores of speech models by the words of their transcripts."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import BatchFeature
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from fusion_bench_featcal.data.generation import GREEDY, row_losses
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.data.speech import SpeechBatches
from fusion_bench_featcal.data.text_limits import positions_of
from fusion_bench_featcal.data.word_errors import speech_library, text_normalizer, word_errors
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.streams.inputs import check_token_ids


@dataclass
class Transcripts:
    """Test examples of speech, which models transcribe by greedy search.

    A transcript begins with the tokens that the tokenizer writes in front of each text. It is
    compared in the words of `text_normalizer` for the language that these tokens name.

    Attributes:
        batches: The test examples.
        batch_size: Number of sounds that are transcribed at once.
    """

    batches: SpeechBatches
    batch_size: int = 1

    def __post_init__(self) -> None:
        speech_library("jiwer")  # if it is missing, no model needs to run

    @torch.no_grad()
    def score(self, model: Any) -> Score:
        """Score a model. Accuracy is 1 - word error rate, at least 0."""
        batches, rows, losses, written = self.batches, self.batches.rows, [], []
        tokenizer, begin = batches.encoder.tokenizer, [batches.start, *batches.prefix]
        longest = max(batches.labels_of(row).shape[1] for row in rows)
        most = min(2 * longest, positions_of(model) - len(begin))
        for first in range(0, len(rows), self.batch_size):
            some = rows[first : first + self.batch_size]
            batch = BatchFeature(batches.joined(some))
            check_token_ids(batch, model, lambda number, some=some: some[number].text.name)
            batch.to(device_of(model), next(model.parameters()).dtype)
            labels, starts = batch.pop("labels"), torch.tensor([begin] * len(some))
            # Sounds are encoded once, for losses and transcripts.
            heard: Any = {"encoder_outputs": model.get_encoder()(**batch)}
            losses.append(row_losses(*batches.targets_of(model, heard | {"labels": labels})))
            heard |= {"decoder_input_ids": starts.to(labels.device), "max_new_tokens": most}
            tokens = model.generate(**heard, **GREEDY)
            written += tokenizer.batch_decode(tokens, skip_special_tokens=True)
        spoken = [str(row.text.target) for row in rows]
        spelling = getattr(tokenizer, "english_spelling_normalizer", None)
        marks = tokenizer.convert_ids_to_tokens(batches.prefix)  # Whisper's name the language
        language = next((code for mark in marks if (code := mark.strip("<|>")) in LANGUAGES), None)
        normalizer = text_normalizer(spoken, language, spelling)
        errors = [word_errors(*pair, normalizer) for pair in zip(spoken, written, strict=True)]
        count = sum(len(normalizer(text).split()) for text in spoken)
        shares = 1 - torch.tensor(errors).double() * len(rows) / max(count, 1)
        accuracy = max(0.0, shares.mean().item())
        return Score(accuracy, torch.cat(losses).double().cpu(), None, shares=shares)
