"""`TextTaskPool`: language models that answer prompts, scored on their answers."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoTokenizer

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.data.generation import (
    METRICS,
    Metric,
    answer_texts,
    exact_matches,
    spearman,
    target_loss,
)
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.data.text_samples import (
    IGNORED,
    Sample,
    TextEncoder,
    TextKind,
    pad_samples,
)
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.settings.fields import is_integer
from fusion_bench_featcal.streams.inputs import check_token_ids
from fusion_bench_featcal.tasks.item_pool import (
    ItemPool,
    Score,
    build_part,
    load_part,
    refuse_unknown_pool_keys,
)


@dataclass(frozen=True)
class TokenisedTask:
    """One task's test rows, tokenised for one kind of model."""

    names: list[str]  # of the rows, for messages
    prompts: list[list[int]]
    samples: list[Sample]  # prompts with their targets
    targets: list[str]


class TextTaskPool(ItemPool, LightningFabricMixin, BaseTaskPool):
    """Evaluates encoder-decoder and decoder-only language models on the texts they generate.

    Rows have the formats of calibration data. Answers are greedy and do not depend on the other
    rows of a batch. `accuracy` is the share of exact matches or Spearman's correlation, whose tasks
    have no `item_correct`. `loss` is the cross-entropy per target token, averaged over rows.
    """

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
        test_datasets: Mapping[str, Any],
        *,
        tokenizer: Any,
        metrics: Mapping[str, Metric] | None = None,
        batch_size: int = 128,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        **unknown: Any,
    ) -> None:
        """Check the settings. `setup` loads data and tokenizer.

        Args:
            test_datasets: Task name -> rows, a path, a hub id or a configuration with `_target_`.
            tokenizer: The tokenizer: a folder, a hub id, a configuration or the object.
            metrics: Task name -> `exact_match` (the default) or `spearman`.
            batch_size: Prompts per batch. It changes memory and speed, not answers.
            max_new_tokens: Longest answer, by default the length of the task's longest target.
            max_length: Longest prompt in tokens, by default the tokenizer's limit.
            **unknown: Refused, except for keys that all FusionBench configurations have.

        Raises:
            ValueError: For unknown keys, tasks or metrics, and values out of range.
        """
        refuse_unknown_pool_keys(TextTaskPool, unknown)
        if not test_datasets:
            raise ValueError("taskpool has no tasks: name their data under taskpool.test_datasets")
        self.metrics: dict[str, Metric] = dict(metrics or {})
        refuse_unknown(self.metrics, test_datasets, "taskpool.metrics.")
        for task, metric in self.metrics.items():
            refuse_unknown([metric], METRICS, f"taskpool.metrics.{task}=")
        lengths = {"max_new_tokens": max_new_tokens, "max_length": max_length}
        lengths = {key: value for key, value in lengths.items() if value is not None}
        for key, value in {"batch_size": batch_size, **lengths}.items():
            if not is_integer(value, 1):
                raise ValueError(f"taskpool.{key} must be a whole number >= 1, got {value!r}")
        super().__init__()
        self._test_datasets = test_datasets
        self._tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length
        self._tokenised: dict[tuple[str, str], TokenisedTask] = {}

    def setup(self) -> None:
        """Load tokenizer and datasets. The first `evaluate` call does it.

        Raises:
            CalibrationError: If something cannot be loaded or a task has no rows.
        """
        self.tokenizer = load_part("taskpool.tokenizer", self._tokenizer, AutoTokenizer)
        for name, configured in self._test_datasets.items():
            setting = f"taskpool.test_datasets.{name}"
            rows = build_part(setting, configured)
            if isinstance(rows, str):
                with naming_setting(setting):
                    rows = load_texts(rows, "test")
            self.test_dataloaders[name] = TextRows(rows, f"task {name!r}, {setting}")
            if not len(self.test_dataloaders[name]):
                raise CalibrationError(f"task {name!r} has no test rows. Check {setting}.")
        self._is_setup = True

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[Any]:
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"{type(model).__name__} cannot generate text: it has no `generate`")
        yield self.fabric.to_device(model).eval()

    def _score(self, model: Any, task: str) -> Score:
        kind: TextKind = "seq2seq" if model.config.is_encoder_decoder else "causal"
        encoder, size = TextEncoder(self.tokenizer, kind, self.max_length), self.batch_size
        if (task, kind) not in self._tokenised:
            self._tokenised[task, kind] = self._tokenise(encoder, task)
        rows = self._tokenised[task, kind]
        # An answer longer than every target cannot be right.
        most = self.max_new_tokens or max(
            sum(token != IGNORED for token in sample.labels or ()) for sample in rows.samples
        )
        for name, sample in zip(rows.names, rows.samples, strict=True):
            check_token_ids(pad_samples([sample], encoder), model, lambda _, name=name: name)
        with self.fabric.autocast(), surgery_task(model, task):
            answers = answer_texts(model, encoder, rows.prompts, batch_size=size, most=most)
            loss = target_loss(model, encoder, rows.samples, batch_size=size)
        if self.metrics.get(task) == "spearman":
            return Score(spearman(answers, rows.targets), loss)
        correct = torch.tensor(exact_matches(answers, rows.targets))
        targets = [target.strip() for target in rows.targets]
        return Score(correct.double().mean().item(), loss, correct, targets)

    def _tokenise(self, encoder: TextEncoder, task: str) -> TokenisedTask:
        rows = self.test_dataloaders[task]
        texts = [rows.read(number) for number in range(len(rows))]
        prompts = [encoder.prompt(text, self.max_new_tokens or 0) for text in texts]
        samples, targets = [encoder.sample(text) for text in texts], []
        for text, sample in zip(texts, samples, strict=True):
            if sample.labels is None:
                raise CalibrationError(f"{text.name} has no target to compare answers with")
            target = text.target
            if not isinstance(target, str):
                ids = [token for token in sample.labels if token != IGNORED]
                target = encoder.tokenizer.decode(ids, skip_special_tokens=True)
            targets.append(target)
        return TokenisedTask([text.name for text in texts], prompts, samples, targets)


def surgery_task(model: Any, task: str) -> AbstractContextManager[Any]:
    """Return a context in which a surgery model corrects features for the task.

    Raises:
        CalibrationError: If a surgery model has no correction for the task.
    """
    return model.for_task(task) if getattr(model, "is_surgery_model", False) else nullcontext()
