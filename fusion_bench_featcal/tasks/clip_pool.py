"""`ClipTaskPool`: FusionBench's CLIP task pool with tasks that YAML alone can define."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPModel, CLIPProcessor

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool

from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.data.pictures import Processor, stack_pixels, to_pixels
from fusion_bench_featcal.data.scoring import Score, Tests
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.fusionbench.processors import load_part
from fusion_bench_featcal.tasks.definition import OpenTask, TaskDefinition, open_task, parse_tasks
from fusion_bench_featcal.tasks.item_pool import ItemPool

LabelledImages = tuple[Tensor, Tensor]

KEPT_BYTES = 64 * 2**20
"""Largest size of a task whose pixels are kept in memory for the next model."""


class ClipTaskPool(ItemPool, CLIPVisionModelTaskPool):  # type: ignore[override]
    """Evaluates CLIP vision models zero-shot on FusionBench's tasks or on tasks defined in YAML.

    It takes the keys of FusionBench's `CLIPVisionModelTaskPool`, gives the same accuracies and
    writes no report files. Each task's head is computed once for several models. With several
    processes each one evaluates everything.
    """

    # set by FusionBench's constructor, which declares neither
    move_to_device: bool
    _test_datasets: dict[str, Any]  # type: ignore[assignment]

    _setting_of_data = "taskpool.tasks.{}.data"
    _config_mapping = CLIPVisionModelTaskPool._config_mapping | {
        "_tasks": "tasks",
        "base_model": "base_model",
    }

    def __init__(
        self,
        test_datasets: Mapping[str, Any] | None = None,
        *,
        tasks: Mapping[str, Any] | None = None,
        base_model: str | None = None,
        processor: Any = None,
        clip_model: object = None,
        data_processor: object = None,
        dataloader_kwargs: Mapping[str, object] | None = None,
        **fusion_bench: object,
    ) -> None:
        """Check the settings. `opened` opens the data, `setup` loads the CLIP model.

        Args:
            test_datasets: Task name -> dataset or its configuration, as in FusionBench.
            tasks: Task name -> the keys of `TaskDefinition`. A task without `data` and
                `test_datasets` has the model pool's `test_datasets`. Without both keys all of the
                model pool's are evaluated.
            base_model: Folder or hub id of a CLIP, the default of `processor` and `clip_model`.
            processor: CLIP processor or its configuration, for images and prompts.
            clip_model: CLIP model or its configuration, whose text tower gives the heads.
            data_processor: Processor for images instead of `processor`: a transformers processor,
                or a callable from an RGB picture to a tensor `[channels, height, width]`.
            dataloader_kwargs: Arguments of `torch.utils.data.DataLoader` (default: batches of 128).
            **fusion_bench: Further keys of FusionBench's pool, such as `fast_dev_run` (one batch
                per task). Others are refused.

        Raises:
            ValueError: For unknown keys, unfit values, or a task with two data.
        """
        self._check_keys(fusion_bench)
        loader = {"batch_size": 128, **(dataloader_kwargs or {})}
        for key in ("shuffle", "drop_last"):
            if loader.get(key):
                raise ValueError(
                    f"taskpool.dataloader_kwargs.{key} must be false: all test examples are used, "
                    "in order"
                )
        super().__init__(
            dict(test_datasets or {}),
            processor=base_model if processor is None else processor,
            clip_model=base_model if clip_model is None else clip_model,
            data_processor=data_processor,
            dataloader_kwargs=loader,
            **{key: value for key, value in fusion_bench.items() if not key.startswith("_")},
        )
        self._tasks, self.base_model = tasks, base_model
        self._kept: dict[str, list[LabelledImages]] = {}
        self._heads: dict[str, Tensor] = {}
        self._definitions = parse_tasks(tasks)
        self._open_tasks: dict[str, OpenTask] = {}
        for name in filter(self._is_own, self._test_datasets):
            raise ValueError(
                f"task {name!r} needs its data once: set either taskpool.tasks.{name}.data or "
                f"taskpool.test_datasets.{name}"
            )

    def _is_own(self, task: str) -> bool:
        return self._definitions.get(task, TaskDefinition()).data is not None

    @property
    def _named_data(self) -> Mapping[str, object]:
        defined = {name: task.data for name, task in self._definitions.items()}
        return self._test_datasets | defined | self._test_datasets  # in this order

    def _setting(self, task: str) -> str:
        is_own = self._is_own(task)
        return self._setting_of_data.format(task) if is_own else super()._setting(task)

    def _load_processors(self) -> None:
        self.processor = load_part("taskpool.processor", self._processor, CLIPProcessor)
        images = self.processor if self._data_processor is None else self._data_processor
        self.data_processor = load_part("taskpool.data_processor", images, CLIPProcessor)

    def _open(self, task: str, rows: object, setting: str) -> Any:
        definition = self._definitions.get(task, TaskDefinition())
        self._open_tasks[task] = opened = open_task(task, definition, rows, setting)
        items = PixelItems(opened.items, self.data_processor)
        if not len(items):
            raise CalibrationError(f"task {task!r} has no test examples. Check {opened.items.name}")
        next(iter(items))  # raises if the first item cannot be used
        options: Any = self._dataloader_kwargs
        return DataLoader(items, collate_fn=partial(_collate, opened.items.name), **options)

    def _load_models(self) -> None:
        # The head always computes in float32.
        self.clip_model = load_part(
            "taskpool.clip_model", self._clip_model, CLIPModel, dtype=torch.float32
        )
        self.clip_model.requires_grad_(False)
        self.clip_model.eval()
        self.clip_model.vision_model = nn.Identity()  # replaced by evaluated models
        self.clip_model.visual_projection.register_forward_pre_hook(_cast_inputs)

    @contextmanager
    def _prepared(self, model: nn.Module) -> Iterator[HFCLIPClassifier]:
        self.clip_model.vision_model = model
        classifier = HFCLIPClassifier(self.clip_model, processor=self.processor)
        if self.move_to_device:
            self.fabric.to_device(classifier)
        try:
            yield classifier.eval()
        finally:
            self.clip_model.vision_model = nn.Identity()  # releases the evaluated model

    def _score(self, model: HFCLIPClassifier, task: str) -> Score:
        """Classify a task's items. The loss is a mean over items (FusionBench's: over batches)."""
        opened = self._open_tasks[task]
        if task not in self._heads:  # the text tower never changes
            model.set_classification_task(opened.classnames, list(opened.templates))
            self._heads[task] = model.zeroshot_weights
        model.zeroshot_weights = self._heads[task]

        def targets(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
            options = {"return_image_embeds": True, "return_dict": True, "task_name": task}
            logits = model(batch["pixel_values"], **options)["logits"].float().cpu()
            if not torch.isfinite(logits).all():
                raise CalibrationError(
                    f"task {task!r}: the evaluated model returns logits that are not finite. Look "
                    "for NaN or infinite values in its weights, or raise fabric.precision"
                )
            return logits[:, None], batch["labels"].cpu()[:, None]

        self.on_task_evaluation_begin(model, task)
        with self.fabric.autocast():
            score = Tests(lambda _: self._batches(task), targets).score(model)
        self.on_task_evaluation_end()
        return score

    def _batches(self, task: str) -> Iterable[dict[str, Tensor]]:
        """Return a task's batches, all of them unless `fast_dev_run` is set.

        The pixels of a small task are kept in memory for the next model.
        """
        loader: Any = self.test_dataloaders[task]
        items = loader.dataset
        if task not in self._kept and items[0][0].nbytes * len(items) < KEPT_BYTES:
            self._kept[task] = list(loader)
        batches: Any = self._kept.get(task, loader)
        chosen = itertools.islice(batches, 1) if self.fast_dev_run else batches
        return ({"pixel_values": pixels, "labels": labels} for pixels, labels in chosen)


class PixelItems(Dataset[tuple[Tensor, int]]):
    """A task's items as pixel values `[channels, height, width]` and label."""

    def __init__(self, items: ImageItems, processor: Processor) -> None:
        self.items, self.processor = items, processor

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        item = self.items[index]
        if "label" not in item:
            raise CalibrationError(
                f"{self.items.row_name(index)} has no label, so accuracy cannot be measured. Check "
                "label_column"
            )
        pixels = to_pixels(item["image"], self.processor, self.items.row_name(index))
        return pixels, item["label"]


def _collate(name: str, batch: Sequence[tuple[Tensor, int]]) -> LabelledImages:
    pixels, labels = zip(*batch, strict=True)
    return stack_pixels(pixels, name), torch.tensor(labels)


def _cast_inputs(projection: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast features of a vision model to the dtype of the head."""
    dtype = next(projection.parameters()).dtype
    return tuple(tensor.to(dtype) for tensor in inputs)
