"""`TextTaskPool`: language models that answer prompts, scored on their answers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from transformers import AutoTokenizer

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseModelPool, BaseTaskPool

from fusion_bench_featcal.data.generation import (
    METRICS,
    Metric,
    answer_texts,
    logits_and_targets,
    spearman,
)
from fusion_bench_featcal.data.scoring import Score, Tests
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_limits import end_tokens, positions_of
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import CausalTextEncoder, Seq2SeqTextEncoder
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.families.base import NO_TARGET
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.fusionbench.processors import load_part
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.tasks.item_pool import ItemPool, open_rows


class TextTaskPool(ItemPool, BaseTaskPool):
    """Evaluates encoder-decoder and decoder-only language models on their answers to prompts.

    Rows have the formats of calibration data. An answer is right if each token of the target is the
    model's first choice given the tokens before it, because greedy search would then generate it.
    `accuracy` is the share of right answers or, with the metric `spearman`, the rank correlation of
    generated answers, whose tasks have no `item_correct`. `loss` is the cross-entropy per target
    token, averaged over rows.
    """

    _keys_by_task = ("metrics",)
    _config_mapping = BaseTaskPool._config_mapping | {
        "_test_datasets": "test_datasets",
        "_tokenizer": "tokenizer",
        "metrics": "metrics",
        "batch_size": "batch_size",
        "max_new_tokens": "max_new_tokens",
        "max_length": "max_length",
    }

    def __init__(
        self,
        test_datasets: Mapping[str, Any] | None = None,
        *,
        tokenizer: object,
        metrics: Mapping[str, Metric] | None = None,
        batch_size: int = 128,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        **unknown: object,
    ) -> None:
        """Check the settings. `opened` loads data and tokenizer.

        Args:
            test_datasets: Task name -> rows, a path, a hub id or a configuration with `_target_`.
                By default the model pool's.
            tokenizer: The tokenizer: a folder, a hub id, a configuration or the object.
            metrics: Task name -> `exact_match` (the default) or `spearman`.
            batch_size: Prompts per batch. It changes memory and speed, not answers.
            max_new_tokens: Longest generated answer, by default the longest target of the task.
            max_length: Longest text in tokens. By default a text above the tokenizer's limit, or
                the model's positions, is an error.
            **unknown: Refused, except for keys that all FusionBench configurations have.

        Raises:
            ValueError: For unknown keys or metrics, and values out of range.
        """
        lengths = {"max_new_tokens": max_new_tokens, "max_length": max_length}
        lengths = {key: value for key, value in lengths.items() if value is not None}
        self._check_keys(unknown, batch_size=batch_size, **lengths)
        self.metrics: dict[str, Metric] = dict(metrics or {})
        for task, metric in self.metrics.items():
            refuse_unknown([metric], METRICS, f"taskpool.metrics.{task}=")
        super().__init__()
        self._test_datasets = test_datasets
        self._tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length
        self._batches: dict[tuple[str, bool], tuple[TextBatches, list[int]]] = {}

    def _load_processors(self) -> None:
        self.tokenizer = load_part("taskpool.tokenizer", self._tokenizer, AutoTokenizer)

    def _open(self, task: str, rows: object, setting: str) -> TextRows:
        opened = open_rows(task, rows, setting)
        _require_target(opened.read(0))
        return opened

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[Any]:
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"{type(model).__name__} cannot generate text: it has no `generate`")
        yield self.fabric.to_device(model).eval()

    def _score(self, model: Any, task: str) -> Score:
        key = task, bool(model.config.is_encoder_decoder)
        if key not in self._batches:
            self._batches[key] = self._tokenize(task, model)
        batches, order = self._batches[key]
        is_corrected = getattr(model, "is_surgery_model", False)
        with self.fabric.autocast(), model.for_task(task) if is_corrected else nullcontext():
            score = Tests(batches.checked, logits_and_targets, order=order).score(model)
            if self.metrics.get(task) == "spearman":
                return Score(self._correlation(model, batches), score.losses, None)
        return score

    def _tokenize(self, task: str, model: Any) -> tuple[TextBatches, list[int]]:
        """Tokenize a task's test examples for a kind of model. Return also their order.

        Targets end at the end tokens of all models of the pool, like the targets of samples.
        """
        rows = self.test_dataloaders[task]
        pool = getattr(self._program, "modelpool", None)
        ends = PoolModels(pool).ends if isinstance(pool, BaseModelPool) else frozenset()
        limits = positions_of(model), end_tokens(model) | ends
        is_seq2seq = model.config.is_encoder_decoder
        encoder_class = Seq2SeqTextEncoder if is_seq2seq else CausalTextEncoder
        encoder = encoder_class(self.tokenizer, self.max_length, *limits)
        settings = FeatCalSettings(batch_size=self.batch_size)
        batches = TextBatches(rows, [*range(len(rows))], settings, encoder, nn.Identity)
        for text in batches.texts:
            _require_target(text)
        return batches.by_length()

    def _correlation(self, model: nn.Module, batches: TextBatches) -> float:
        """Return Spearman's correlation of generated answers and targets."""
        encoder, decode = batches.encoder, partial(self.tokenizer.decode, skip_special_tokens=True)
        ids = [[i for i in sample.labels or () if i != NO_TARGET] for sample in batches.encoded]
        targets = [
            text.target if isinstance(text.target, str) else decode(tokens)
            for text, tokens in zip(batches.texts, ids, strict=True)
        ]
        # An answer longer than every target cannot be right.
        most = self.max_new_tokens or max(map(len, ids))
        prompts = [encoder.prompt(text, most).ids for text in batches.texts]
        answers = answer_texts(model, encoder, prompts, batch_size=self.batch_size, most=most)
        return spearman(answers, targets)


def _require_target(text: Text) -> None:
    target = text.prompt.get("labels") if text.form == "tokens" else text.target
    if target is None:
        raise CalibrationError(f"{text.name} has no target to compare answers with")
