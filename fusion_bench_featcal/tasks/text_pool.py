"""`TextTaskPool`: language models that answer prompts, scored on what they write."""

import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_samples import (
    IGNORED,
    Sample,
    TextEncoder,
    TextKind,
    pad_samples,
)
from fusion_bench_featcal.nearest_names import refuse_unknown_keys
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.inputs import check_token_ids
from fusion_bench_featcal.tasks.pool_settings import (
    build_part,
    evaluation_report,
    load_part,
    refuse_unknown_pool_keys,
)
from fusion_bench_featcal.tasks.text_generation import (
    METRICS,
    Metric,
    answer_texts,
    exact_matches,
    spearman,
    target_loss,
)

log = logging.getLogger(__name__)

# rows evaluated in a trial run
_TRIAL_ROWS = 16


@dataclass(frozen=True)
class TokenisedTask:
    """One task's test rows, tokenised for one kind of model."""

    prompts: list[list[int]]
    samples: list[Sample]  # prompts with their targets
    targets: list[str]


class TextTaskPool(LightningFabricMixin, BaseTaskPool):
    """Evaluates encoder-decoder and decoder-only language models by what they generate.

    Rows are plain text (`prompt`, `target`) or tokenised (`input_ids`, `labels`), as FusionBench's
    GLUE loader gives. Answers are greedy, attention masks are always passed, and the answer to a
    row does not depend on the rows beside it.

    Attributes:
        item_correct: Of the last `evaluate` call: task name -> bool tensor `[test rows]`, in the
            order of the data set; tasks scored by rank correlation have none.
        item_classes: Task name -> target of each test row, of the tasks evaluated so far.
        test_dataloaders: Task name -> its rows; `evaluate` takes those that are in it.
    """

    _config_mapping = BaseTaskPool._config_mapping | {
        "_test_datasets": "test_datasets",
        "_tokenizer": "tokenizer",
        "metrics": "metrics",
        "batch_size": "batch_size",
        "max_new_tokens": "max_new_tokens",
        "max_length": "max_length",
        "fast_dev_run": "fast_dev_run",
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
        fast_dev_run: bool = False,
        **unknown: Any,
    ) -> None:
        """Check the settings; data and tokenizer are loaded by `setup`.

        Args:
            test_datasets: Task name -> rows, or their configuration with `_target_`.
            tokenizer: The tokenizer: a folder or hub id, a configuration, or the object.
            metrics: Task name -> `exact_match` (the default) or `spearman`.
            batch_size: Rows answered together; changes memory and speed, not answers.
            max_new_tokens: Longest answer; None: as long as the task's longest target.
            max_length: Longest prompt in tokens, cut beyond; None: the tokenizer's limit.
            fast_dev_run: Evaluate on a few rows a task.
            **unknown: Refused, but for keys that all of FusionBench's configurations have.

        Raises:
            ValueError: For unknown keys, tasks or metrics, and values out of range.
        """
        refuse_unknown_pool_keys(TextTaskPool, unknown)
        if not test_datasets:
            raise ValueError("taskpool has no tasks: name their data under taskpool.test_datasets")
        chosen = dict(metrics or {})
        refuse_unknown_keys(chosen, list(test_datasets), "taskpool.metrics")
        for task, metric in chosen.items():
            refuse_unknown_keys([metric], METRICS, f"taskpool.metrics.{task}")
        numbers = {"max_new_tokens": max_new_tokens, "max_length": max_length}
        numbers = {key: value for key, value in numbers.items() if value is not None}
        for key, value in {"batch_size": batch_size, **numbers}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"taskpool.{key} must be a whole number >= 1, got {value!r}")
        super().__init__()
        self._test_datasets = test_datasets
        self._tokenizer = tokenizer
        self.metrics = metrics
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length
        self.fast_dev_run = fast_dev_run
        self.item_correct: dict[str, Tensor] = {}
        self.item_classes: dict[str, list[str]] = {}
        self.test_dataloaders: dict[str, Sequence[Mapping[str, Any]]] = {}
        self._tokenised: dict[tuple[str, str], TokenisedTask] = {}
        self._is_setup = False

    def setup(self) -> None:
        """Load tokenizer and data sets; `evaluate` does it when first called.

        Raises:
            CalibrationError: If something cannot be loaded or a task has no rows, naming it.
        """
        self.tokenizer = load_part("taskpool.tokenizer", self._tokenizer, AutoTokenizer)
        for name, configured in self._test_datasets.items():
            rows = _rows(f"taskpool.test_datasets.{name}", configured)
            if not len(rows):
                raise CalibrationError(
                    f"task {name!r} has no test rows. Check taskpool.test_datasets.{name}."
                )
            self.test_dataloaders[name] = rows
        self._is_setup = True

    def evaluate(self, model: nn.Module, name: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Let a model answer every test row, and keep which answers were right.

        Returns:
            `{"model_info": {...}, <task>: {"accuracy", "loss"}, "average": {...}}` for the tasks
            in `test_dataloaders`. `accuracy` is the share of exact matches or, for tasks scored by
            it, Spearman's correlation; `loss` is the mean cross-entropy per target token, averaged
            over rows.

        Raises:
            CalibrationError: If a row has no text or target, or token ids that the model lacks.
            TypeError: If the model does not generate text.
        """
        refuse_unknown_keys(kwargs, ["model", "name"], "evaluate")
        if not callable(getattr(model, "generate", None)):
            raise TypeError(f"{type(model).__name__} cannot generate text: it has no `generate`")
        if not self._is_setup:
            self.setup()
        self.item_correct = {}
        model = self.fabric.to_device(model).eval()
        scores = {
            task: self._score(model, task)
            for task in progress_bar(list(self.test_dataloaders), what="evaluating", unit="task")
        }
        report = evaluation_report(model, name, scores)
        log.debug("evaluation result: %s", report)
        return report

    def _score(self, model: Any, name: str) -> dict[str, float]:
        kind: TextKind = "seq2seq" if model.config.is_encoder_decoder else "causal"
        encoder = TextEncoder(self.tokenizer, kind, self.max_length)
        task, size = self._task(encoder, name), self.batch_size
        # An answer longer than every target cannot be right.
        most = self.max_new_tokens or max(
            sum(token != IGNORED for token in sample.labels or ()) for sample in task.samples
        )
        for number, sample in enumerate(task.samples):
            place = f"task {name!r}, test row {number}"
            check_token_ids(pad_samples([sample], encoder), model, lambda _, place=place: place)
        with self.fabric.autocast(), surgery_task(model, name):
            answers = answer_texts(model, encoder, task.prompts, batch_size=size, most=most)
            loss = target_loss(model, encoder, task.samples, batch_size=size)
        if (self.metrics or {}).get(name) == "spearman":
            return {"accuracy": spearman(answers, task.targets), "loss": loss}
        correct = torch.tensor(exact_matches(answers, task.targets))
        self.item_correct[name] = correct
        self.item_classes[name] = [target.strip() for target in task.targets]
        return {"accuracy": correct.double().mean().item(), "loss": loss}

    def _task(self, encoder: TextEncoder, name: str) -> TokenisedTask:
        """The task's rows in token ids, made once for each kind of model."""
        key = (name, encoder.kind)
        if key not in self._tokenised:
            most = _TRIAL_ROWS if self.fast_dev_run else None
            rows = itertools.islice(iter(self.test_dataloaders[name]), most)
            self._tokenised[key] = _read_task(encoder, name, rows, self.max_new_tokens or 0)
        return self._tokenised[key]


def _rows(place: str, configured: Any) -> Any:
    """Open a data set that is given as a path, a hub id, a configuration or itself.

    Raises:
        CalibrationError: If it cannot be loaded.
    """
    if not isinstance(configured, str):
        return build_part(place, configured)
    try:
        return load_texts(configured, "test")
    except (ValueError, CalibrationError) as error:
        raise CalibrationError(f"{place}: {error}") from error


def surgery_task(model: Any, task: str) -> AbstractContextManager[Any]:
    """Context in which a surgery model knows the task, as FusionBench's image task pools tell it.

    Raises:
        CalibrationError: If a surgery model has no correction for the task.
    """
    return model.for_task(task) if getattr(model, "is_surgery_model", False) else nullcontext()


def _read_task(
    encoder: TextEncoder, name: str, rows: Iterable[Mapping[str, Any]], reserved: int
) -> TokenisedTask:
    task = TokenisedTask([], [], [])
    for number, row in enumerate(rows):
        place = f"task {name!r}, test row {number}"
        sample, target = encoder.sample(row, place), row.get("target")
        if sample.labels is None:
            raise CalibrationError(f"{place} has no target to compare answers with")
        if not isinstance(target, str):
            ids = [token for token in sample.labels if token != IGNORED]
            target = encoder.tokenizer.decode(ids, skip_special_tokens=True)
        task.prompts.append(encoder.prompt(row, place, reserved))
        task.samples.append(sample)
        task.targets.append(target)
    return task
