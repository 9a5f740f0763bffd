"""`EncoderTaskPool`: encoders of texts or images, scored by the nearest class of a frozen head."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
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

from fusion_bench_featcal.data.embeddings import MODES, TEMPERATURE, Pooling, class_logits
from fusion_bench_featcal.data.image_batches import ImageBatches
from fusion_bench_featcal.data.images import ImageItems, load_images
from fusion_bench_featcal.data.labels import LABEL, encode_labels
from fusion_bench_featcal.data.loading import unloadable
from fusion_bench_featcal.data.scoring import Score, class_tests
from fusion_bench_featcal.data.tables import load_texts
from fusion_bench_featcal.data.text_rows import TextRows
from fusion_bench_featcal.encoders.naming import class_of
from fusion_bench_featcal.encoders.optional import pooled_encoder
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.fusionbench.processors import load_part
from fusion_bench_featcal.fusionbench.run_settings import plain_config
from fusion_bench_featcal.models.hub import fetch
from fusion_bench_featcal.settings.fields import check_values, is_text_list, setting
from fusion_bench_featcal.streams.inputs import check_token_ids, to_device
from fusion_bench_featcal.tasks.item_pool import ItemPool


@dataclass(frozen=True, kw_only=True)
class Head:
    """A task's frozen head. Its fields are the keys under `heads.<task>` in YAML."""

    class_names: Sequence[str] | None = setting(
        None,
        "Class names by number. Null: the names in the data.",
        accepts="a list of texts",
        check=is_text_list,
    )
    template: str = setting(
        "{}",
        "Text that the base model embeds for a class.",
        accepts="a text with {} for the class name",
        check=lambda text: isinstance(text, str) and "{}" in text,
    )
    temperature: float = setting(TEMPERATURE, "Temperature, by which cosines are divided.", gt=0)
    file: str | None = setting(
        None, "A safetensors file with `head`, `[classes, d]`, instead of embedded class names."
    )


@dataclass(frozen=True)
class EncoderTask:
    """A task's test examples.

    Attributes:
        name: The dataset's name in messages.
        classes: Class names by index.
        labels: Class indices.
        batches: Returns a model's inputs, `batch_size` examples each.
        order: Index of each example of the batches, or None if they are in order.
    """

    name: str
    classes: Sequence[str]
    labels: list[int]
    batches: Callable[[nn.Module], Iterable[Any]]
    order: Sequence[int] | None = None


class EncoderTaskPool(ItemPool, BaseTaskPool):
    """Evaluates encoders of texts or images by cosines of embeddings and frozen class vectors.

    The vectors are the base's embeddings of class names, as for CLIP's zero-shot heads, or come
    from a file. Only the encoder differs between the evaluated models.
    """

    _keys_by_task = ("heads",)
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
        heads: Mapping[str, Mapping[str, object]] | None = None,
        pooling: str | None = None,
        batch_size: int = 64,
        **unknown: object,
    ) -> None:
        """Check the settings. `opened` opens the data, `setup` loads the base.

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
        self._check_keys(unknown, batch_size=batch_size)
        if pooling is not None:
            refuse_unknown([pooling], MODES, "taskpool.pooling=")
        super().__init__()
        self._test_datasets, self._base_model = test_datasets, base_model
        self._processor, self._pooling, self.batch_size = processor, pooling, batch_size
        self.heads = dict[str, Head]()
        for task, keys in plain_config(heads or {}).items():
            check_values(Head, keys, f"taskpool.heads.{task}.")
            self.heads[task] = Head(**keys)
        self._vectors: dict[str, Tensor] = {}
        self._label = f"taskpool.base_model={base_model}"

    @cached_property
    def folder(self) -> Path:
        """The base's folder, which is downloaded."""
        return fetch(self._base_model, self._label)

    @cached_property
    def reader(self) -> Any:
        """The base as sentence-transformers opens it, which tokenizes texts like that library."""
        return pooled_encoder(self.folder, self._label)

    @cached_property
    def pooling(self) -> Pooling:
        """The pooling from the setting or, without one, from the base's files.

        Raises:
            CalibrationError: If neither names a pooling.
        """
        if self._pooling is not None:
            return Pooling(self._pooling)  # type: ignore[arg-type]
        if not class_of(self.folder):
            raise CalibrationError(
                f"{self._label} has no files of sentence-transformers (modules.json) with its "
                f"pooling: set taskpool.pooling to one of {', '.join(MODES)}"
            )
        return self.reader.pooling

    def _load_processors(self) -> None:
        is_image = (self.folder / "preprocessor_config.json").is_file()
        kind = AutoImageProcessor if is_image else AutoTokenizer
        source = str(self.folder) if self._processor is None else self._processor
        self.processor = load_part("taskpool.processor", source, kind)
        self._is_text = hasattr(self.processor, "model_max_length")

    def _open(self, task: str, rows: object, setting: str) -> EncoderTask:
        head, size = self.heads.setdefault(task, Head()), self.batch_size
        opened, reader = (
            (_open_texts, self._tokenized) if self._is_text else (_open_images, self.processor)
        )
        with error_context(setting, cause=unloadable):
            items = opened(rows, f"task {task!r}", head, reader, size)
        if head.file is None and not self._is_text:
            raise CalibrationError(
                f"images have no class names to embed: set taskpool.heads.{task}.file"
            )
        if head.file is not None:
            with error_context(f"taskpool.heads.{task}.file={head.file!r}", cause=unloadable):
                vectors = load_file(head.file)["head"].float()
            if len(vectors) <= max(items.labels):
                raise CalibrationError(
                    f"{items.name} has labels up to {max(items.labels)}, but its head has "
                    f"{len(vectors)} classes: check taskpool.heads.{task}"
                )
            self._vectors[task] = F.normalize(vectors, dim=-1)
        return items

    def _tokenized(self, texts: Sequence[str]) -> list[dict[str, Tensor]]:
        starts = range(0, len(texts), self.batch_size)
        return [self.reader.tokenized(texts[start : start + self.batch_size]) for start in starts]

    @torch.no_grad()
    def _load_models(self) -> None:
        """Embed class names with the base, except for images and heads in files."""
        if not self._is_text:
            return
        pooling = self.pooling  # may raise, so it comes before the base
        if self._processor is not None:
            self.reader.model[0].processor = self.processor
        base = self.fabric.to_device(self.reader.model.transformers_model)
        for task, items in self.opened.items():
            head = self.heads[task]
            if head.file is None:
                texts = [head.template.replace("{}", name) for name in items.classes]
                batches = [to_device(batch, base.device) for batch in self._tokenized(texts)]
                features = [pooling.features(base, batch) for batch in batches]
                self._vectors[task] = F.normalize(torch.cat(features), dim=-1)

    def _score(self, model: Any, task: str) -> Score:
        items, head = self.test_dataloaders[task], self._vectors[task]
        is_corrected, pooled = getattr(model, "is_surgery_model", False), self.pooling.features

        def logits(model: Any, inputs: Any) -> Tensor:
            features = model.features(task, **inputs) if is_corrected else pooled(model, inputs)
            return class_logits(features, head, self.heads[task].temperature)

        tests = class_tests(items.batches, self.batch_size, items.labels, logits, items.order)
        with self.fabric.autocast():
            return tests.score(model)


def _open_texts(source: object, name: str, head: Head, tokenized: Any, size: int) -> EncoderTask:
    """Read all texts of a task. They are sorted by length, which saves padding."""
    rows = TextRows(load_texts(source, "test") if isinstance(source, str) else source, name)
    values = [rows[index].get(LABEL) for index in range(len(rows))]
    _require_labels(values, name)
    names = head.class_names or rows.classes(LABEL)
    labels, classes = encode_labels(values, None, names, name)
    texts = [rows.read(index).prompt for index in range(len(rows))]
    for index, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise CalibrationError(
                f"{rows.row_name(index)}: the text is empty or not a text. Remove the example"
            )
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    batches = cache(lambda: tokenized([texts[index] for index in order]))

    def checked(model: nn.Module) -> list[dict[str, Tensor]]:
        for index, batch in enumerate(batches()):
            first = index * size
            check_token_ids(
                batch, model, lambda row, first=first: rows.row_name(order[first + row])
            )
        return batches()

    return EncoderTask(name, classes or [], labels, checked, order)


def _open_images(source: object, name: str, head: Head, processor: Any, size: int) -> EncoderTask:
    rows = load_images(source, usual_split="test") if isinstance(source, str) else source
    items = ImageItems(rows, name=name, classnames=head.class_names)
    labels = items.labels or [items.read(index)[1] for index in range(len(items))]
    _require_labels(labels, name)
    classes = items.classnames or [str(index) for index in range(max(labels) + 1)]  # type: ignore[operator]
    list(ImageBatches(items, [0], 1, processor))  # raises if the first image cannot be used
    batches = ImageBatches(items, range(len(items)), size, processor)
    return EncoderTask(name, classes, labels, lambda _: batches)  # type: ignore[arg-type]


def _require_labels(labels: Sequence[object], name: str) -> None:
    if not labels:
        raise CalibrationError(f"{name} has no test examples")
    if None in labels:
        raise CalibrationError(
            f"{name}: example {labels.index(None)} has no {LABEL}, which the scores need"
        )
