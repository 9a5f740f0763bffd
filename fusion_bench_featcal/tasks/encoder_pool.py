"""`EncoderTaskPool`: encoders of texts or images, scored by the nearest class of a frozen head."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoImageProcessor, AutoTokenizer

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench import BaseTaskPool
from fusion_bench.mixins import LightningFabricMixin

from fusion_bench_featcal.data.embeddings import (
    MODES,
    TEMPERATURE,
    Pooling,
    class_logits,
)
from fusion_bench_featcal.data.image_batches import ImageBatches
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.labels import LABEL, encode_labels
from fusion_bench_featcal.data.loading import naming_setting
from fusion_bench_featcal.data.scoring import Score, class_tests
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.encoders.naming import class_of
from fusion_bench_featcal.encoders.optional import pooled_encoder
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.fusionbench.options import plain_config
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.settings.fields import check_values, is_integer, is_text_list, setting
from fusion_bench_featcal.streams.inputs import check_token_ids, to_device
from fusion_bench_featcal.tasks.item_pool import (
    ItemPool,
    build_part,
    load_part,
    refuse_unknown_pool_keys,
)


@dataclass(frozen=True, kw_only=True)
class Head:
    """A task's frozen head. Its fields are the keys under `heads.<task>` in YAML."""

    class_names: Sequence[str] | None = setting(
        None,
        "Class names by number. null: those of the data.",
        accepts="a list of texts",
        check=is_text_list,
    )
    template: str = setting(
        "{}",
        "Text that the base embeds for a class.",
        accepts="a text with {} for the class name",
        check=lambda text: isinstance(text, str) and "{}" in text,
    )
    temperature: float = setting(TEMPERATURE, "Divisor of cosines.", gt=0)
    file: str | None = setting(
        None, "A safetensors file with `head`, `[classes, d]`, instead of embedded class names."
    )


@dataclass(frozen=True)
class EncoderTask:
    """A task's test items.

    Attributes:
        name: Their name in messages.
        classes: Class names by number.
        labels: Class numbers.
        batches: Returns a model's inputs, `batch_size` items each.
        order: Number of each item in the batches, or None if they are in order.
    """

    name: str
    classes: Sequence[str]
    labels: list[int]
    batches: Callable[[nn.Module], Iterable[Any]]
    order: Sequence[int] | None = None


class EncoderTaskPool(ItemPool, LightningFabricMixin, BaseTaskPool):
    """Evaluates encoders of texts or images by cosines of embeddings and frozen class vectors.

    The vectors are the base's embeddings of class names, as for CLIP's zero-shot heads, or come
    from a file. Only the encoder differs between the evaluated models.
    """

    _config_mapping = BaseTaskPool._config_mapping | {
        "_test_datasets": "test_datasets",
        "_base_model": "base_model",
        "_processor": "processor",
        "_heads": "heads",
        "_pooling": "pooling",
        "batch_size": "batch_size",
    }

    def __init__(
        self,
        test_datasets: Mapping[str, Any] | None = None,
        *,
        base_model: str,
        processor: Any = None,
        heads: Mapping[str, Mapping[str, Any]] | None = None,
        pooling: str | None = None,
        batch_size: int = 64,
        **unknown: Any,
    ) -> None:
        """Check the settings. `setup` loads data and base.

        Args:
            test_datasets: Task name -> rows, a path, a hub id or a configuration with `_target_`.
                Rows have `text` or `image`, and `label`. By default the model pool's.
            base_model: Folder or hub id of the encoder that embeds class names.
            processor: Tokenizer or image processor: a folder, a hub id, a configuration or the
                object. By default the base's.
            heads: Task name -> the keys of `Head`, if they differ from the defaults.
            pooling: How tokens become an embedding: mean, cls, last or max. By default as the
                base's files of sentence-transformers say.
            batch_size: Items per batch.
            **unknown: Refused, except for keys that all FusionBench configurations have.

        Raises:
            ValueError: For unknown keys or tasks, and values that are not accepted.
        """
        refuse_unknown_pool_keys(EncoderTaskPool, unknown)
        if pooling is not None:
            refuse_unknown([pooling], MODES, "taskpool.pooling=")
        if not is_integer(batch_size, 1):
            raise ValueError(f"taskpool.batch_size must be a whole number >= 1, got {batch_size!r}")
        super().__init__()
        self._test_datasets, self._base_model = test_datasets, base_model
        self._processor, self._pooling, self.batch_size = processor, pooling, batch_size
        self.heads = _parsed(heads or {}, test_datasets or heads or ())
        self._vectors: dict[str, Tensor] = {}

    @cached_property
    def folder(self) -> Path:
        """The base's folder, which is downloaded."""
        return fetch(self._base_model, self._label)

    @property
    def _label(self) -> str:
        return f"taskpool.base_model={self._base_model}"

    @cached_property
    def reader(self) -> Any:
        """The base, opened by sentence-transformers, which reads texts as it does."""
        return pooled_encoder(self.folder, self._label)

    @cached_property
    def pooling(self) -> Pooling:
        """The pooling of the setting, else of the base's files.

        Raises:
            CalibrationError: If neither the setting nor the base's files say.
        """
        if self._pooling is not None:
            return Pooling(self._pooling)  # type: ignore[arg-type]
        if not class_of(self.folder):
            raise CalibrationError(
                f"{self._label} has no files of sentence-transformers (modules.json), which "
                f"say how it pools: set taskpool.pooling to one of {', '.join(MODES)}"
            )
        return self.reader.pooling

    def setup(self) -> None:
        """Load processor, datasets and heads. The first `evaluate` call does it.

        Raises:
            CalibrationError: If something cannot be loaded, or a task has no rows or labels.
            ValueError: If a task has no data.
        """
        data = self.test_data
        refuse_unknown(self.heads, data, "taskpool.heads.")
        self.heads = {task: self.heads.get(task, Head()) for task in data}
        is_image = (self.folder / "preprocessor_config.json").is_file()
        kind = AutoImageProcessor if is_image else AutoTokenizer
        source = str(self.folder) if self._processor is None else self._processor
        processor = load_part("taskpool.processor", source, kind)
        if is_text := hasattr(processor, "model_max_length"):
            _ = self.pooling  # raises before texts are read
            if self._processor is not None:
                self.reader.model[0].processor = processor
        for task, configured in data.items():
            self.test_dataloaders[task] = self._opened(task, configured, processor, is_text)
        if any(head.file is None for head in self.heads.values()):
            if not is_text:
                raise CalibrationError(
                    "images have no class names to embed: set taskpool.heads.<task>.file"
                )
            self._embed_names()
        self._is_setup = True

    def _opened(self, task: str, configured: Any, processor: Any, is_text: bool) -> EncoderTask:
        """Open a task's items, and read its head if it is a file."""
        setting, head = f"taskpool.test_datasets.{task}", self.heads[task]
        rows = build_part(setting, configured)
        opened, reader = (_open_texts, self.reader) if is_text else (_open_images, processor)
        with naming_setting(setting):
            items = opened(rows, f"task {task!r}", head, reader, self.batch_size)
        if not len(items.labels):
            raise CalibrationError(f"task {task!r} has no test rows. Check {setting}.")
        if head.file is not None:
            with naming_setting(f"taskpool.heads.{task}.file", head.file):
                self._vectors[task] = F.normalize(load_file(head.file)["head"].float(), dim=-1)
        return items

    @torch.no_grad()
    def _embed_names(self) -> None:
        base = self.fabric.to_device(self.reader.model.transformers_model)
        for task, head in self.heads.items():
            if head.file is None:
                names = self.test_dataloaders[task].classes
                texts = [head.template.replace("{}", name) for name in names]
                batches = _text_batches(self.reader, texts, self.batch_size)
                features = [self.pooling.features(base, to_device(b, base.device)) for b in batches]
                self._vectors[task] = F.normalize(torch.cat(features), dim=-1)

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[Any]:
        yield self.fabric.to_device(model).eval()

    def _score(self, model: Any, task: str) -> Score:
        items, head = self.test_dataloaders[task], self._vectors[task]
        if len(head) <= max(items.labels):
            raise CalibrationError(
                f"{items.name} has labels up to {max(items.labels)}, and its head has "
                f"{len(head)} classes: check taskpool.heads.{task}"
            )
        is_corrected = getattr(model, "is_surgery_model", False)

        def logits(model: Any, inputs: Any) -> Tensor:
            if is_corrected:
                features = model.features(task, **inputs)
            else:
                features = self.pooling.features(model, inputs)
            return class_logits(features, head, self.heads[task].temperature)

        tests = class_tests(items.batches, self.batch_size, items.labels, logits, items.order)
        with self.fabric.autocast():
            return tests.score(model)


def _parsed(heads: Any, tasks: Collection[str]) -> dict[str, Head]:
    """Return the head of every task."""
    keys_of = plain_config(heads)
    refuse_unknown(keys_of, tasks, "taskpool.heads.")
    for task, keys in keys_of.items():
        check_values(Head, keys, f"taskpool.heads.{task}.")
    return {task: Head(**keys_of.get(task, {})) for task in tasks}


def _open_texts(source: Any, name: str, head: Head, reader: Any, batch_size: int) -> EncoderTask:
    """Read and tokenize all texts of a task, sorted by their length, which pads batches little."""
    rows = TextRows(load_texts(source, "test") if isinstance(source, str) else source, name)
    values = [rows[number].get(LABEL) for number in range(len(rows))]
    _require_labels(values, name)
    names = head.class_names or rows.classes(LABEL)
    labels, classes = encode_labels(values, None, names, name)
    texts = [_text_of(rows, number) for number in range(len(rows))]
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    batches = _text_batches(reader, [texts[number] for number in order], batch_size)

    def checked(model: nn.Module) -> list[dict[str, Tensor]]:
        for number, batch in enumerate(batches):
            first = number * batch_size
            check_token_ids(batch, model, lambda row, first=first: rows.at(order[first + row]))
        return batches

    return EncoderTask(name, classes or [], labels, checked, order)


def _text_of(rows: TextRows, number: int) -> str:
    """Return a row's text. Raises a CalibrationError that names the row if it has none."""
    text = rows.read(number).prompt
    if not isinstance(text, str) or not text.strip():
        raise CalibrationError(f"{rows.at(number)}: the text is empty, or no text. Remove the row")
    return text


def _text_batches(reader: Any, texts: Sequence[str], size: int) -> list[dict[str, Tensor]]:
    return [reader.tokenized(texts[start : start + size]) for start in range(0, len(texts), size)]


def _open_images(
    source: Any, name: str, head: Head, processor: Any, batch_size: int
) -> EncoderTask:
    rows = load_images(source, usual_split="test") if isinstance(source, str) else source
    items = ImageItems(rows, name=name, classnames=head.class_names)
    labels = [items.read(number)[1] for number in range(len(items))]
    _require_labels(labels, name)
    classes = items.classnames or [str(number) for number in range(max(labels) + 1)]  # type: ignore[operator]
    batches = ImageBatches(items, range(len(items)), batch_size, processor)
    return EncoderTask(name, classes, labels, lambda _: batches)  # type: ignore[arg-type]


def _require_labels(labels: Sequence[Any], name: str) -> None:
    if None in labels:
        raise CalibrationError(
            f"{name}: item {labels.index(None)} has no {LABEL}, which scores need"
        )
