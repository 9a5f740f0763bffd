"""Scores of speech models by the words of their transcripts."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import BatchFeature
from transformers.models.whisper.tokenization_whisper import LANGUAGES

from fusion_bench_featcal.data.generation import GREEDY, logits_and_targets, row_losses
from fusion_bench_featcal.data.scoring import Score
from fusion_bench_featcal.data.speech import SpeechBatches
from fusion_bench_featcal.data.text_limits import positions_of
from fusion_bench_featcal.data.word_errors import speech_library, text_normalizer, word_errors
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.modules.models import device_of
from fusion_bench_featcal.results.names import WORD_ERRORS
from fusion_bench_featcal.streams.inputs import check_token_ids


@dataclass
class TranscriptScorer:
    """Scores speech models by the words of their transcripts, which greedy search generates.

    A transcript begins with the tokens that the tokenizer writes before each text. They name the
    language in which `text_normalizer` compares words.

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
        batches, examples, losses, hypotheses = self.batches, self.batches.rows, [], []
        tokenizer, prefix = batches.encoder.tokenizer, [batches.start, *batches.prefix]
        longest = max(batches.encode_target(example).shape[1] for example in examples)
        limit = min(2 * longest, positions_of(model) - len(prefix))
        for start in range(0, len(examples), self.batch_size):
            chunk = examples[start : start + self.batch_size]
            batch = BatchFeature(batches.collate(chunk))
            check_token_ids(batch, model, lambda index, chunk=chunk: chunk[index].text.name)
            batch.to(device_of(model), next(model.parameters()).dtype)
            labels, prefixes = batch.pop("labels"), torch.tensor([prefix] * len(chunk))
            # Sounds are encoded once, for losses and transcripts.
            inputs: Any = {"encoder_outputs": model.get_encoder()(**batch)}
            logits, targets = logits_and_targets(model, inputs | {"labels": labels})
            targets[:, : len(batches.prefix)] = NO_TARGET  # the first tokens are no words
            losses.append(row_losses(logits, targets))
            inputs |= {"decoder_input_ids": prefixes.to(labels.device), "max_new_tokens": limit}
            tokens = model.generate(**inputs, **GREEDY)
            hypotheses += tokenizer.batch_decode(tokens, skip_special_tokens=True)
        references = [str(example.text.target) for example in examples]
        spelling = getattr(tokenizer, "english_spelling_normalizer", None)
        marks = tokenizer.convert_ids_to_tokens(batches.prefix)  # Whisper's name the language
        language = next((code for mark in marks if (code := mark.strip("<|>")) in LANGUAGES), None)
        normalizer = text_normalizer(references, language, spelling)
        errors = [word_errors(*p, normalizer) for p in zip(references, hypotheses, strict=True)]
        words = sum(len(normalizer(text).split()) for text in references)
        terms = 1 - torch.tensor(errors).double() * len(examples) / max(words, 1)
        accuracy = max(0.0, terms.mean().item())
        losses_by_sample = torch.cat(losses).double().cpu()
        return Score(accuracy, losses_by_sample, None, metric=WORD_ERRORS, terms=terms)
