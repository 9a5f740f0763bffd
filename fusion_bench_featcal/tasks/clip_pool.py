"""`ClipTaskPool`: FusionBench's CLIP task pool with tasks that YAML alone can define."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from transformers import CLIPModel, CLIPProcessor

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool

from fusion_bench_featcal.tasks.definition import (
    TaskDefinition,
    open_task,
    parse_tasks,
)
from fusion_bench_featcal.tasks.heads import forget_stored_heads
from fusion_bench_featcal.tasks.item_pool import (
    ItemPool,
    Score,
    build_part,
    load_part,
    refuse_unknown_pool_keys,
)
from fusion_bench_featcal.tasks.scoring import (
    EvaluationItems,
    PixelCache,
    evaluation_loader,
    loader_settings,
    score,
)


class ClipTaskPool(ItemPool, CLIPVisionModelTaskPool):  # type: ignore[override]
    """Evaluates CLIP vision models zero-shot on FusionBench's tasks or on tasks defined in YAML.

    It takes the keys of FusionBench's `CLIPVisionModelTaskPool`, gives the same accuracies and
    writes no report files. Images are processed once for several models, and each task's head is
    computed once. With several processes each one evaluates everything.
    """

    # set by FusionBench's constructor, which declares neither
    move_to_device: bool
    _test_datasets: dict[str, Any]

    _config_mapping = CLIPVisionModelTaskPool._config_mapping | {
        "_tasks": "tasks",
        "base_model": "base_model",
        "pixel_cache_mb": "pixel_cache_mb",
    }

    def __init__(
        self,
        test_datasets: Mapping[str, Any] | None = None,
        *,
        tasks: Mapping[str, Any] | None = None,
        base_model: str | None = None,
        processor: Any = None,
        clip_model: Any = None,
        data_processor: Any = None,
        dataloader_kwargs: Mapping[str, Any] | None = None,
        pixel_cache_mb: float = 512,
        **fusion_bench: Any,
    ) -> None:
        """Check the settings, and open the data of `tasks` before any model is loaded.

        Args:
            test_datasets: Task name -> dataset or its configuration, as in FusionBench.
            tasks: Task name -> the keys of `TaskDefinition`.
            base_model: Folder or hub id of a CLIP, the default of `processor` and `clip_model`.
            processor: CLIP processor or its configuration, for images and prompts.
            clip_model: CLIP model or its configuration, whose text tower gives the heads.
            data_processor: Processor for images instead of `processor`: a transformers processor,
                or a callable from an RGB picture to a tensor `[channels, height, width]`.
            dataloader_kwargs: Arguments of `torch.utils.data.DataLoader` (default: batches of 128).
            pixel_cache_mb: Memory for processed images kept between `evaluate` calls, in MiB. A
                task that does not fit is processed again each time.
            **fusion_bench: Further keys of FusionBench's pool, such as `fast_dev_run` (one batch
                per task). Others are refused.

        Raises:
            ValueError: For unknown keys, unfit values, paths that do not exist, or class names that
                clash with FusionBench's.
            CalibrationError: If a task's data cannot be read.
        """
        refuse_unknown_pool_keys(ClipTaskPool, fusion_bench)
        if isinstance(pixel_cache_mb, bool) or not pixel_cache_mb >= 0:
            raise ValueError(
                f"taskpool.pixel_cache_mb must be a number >= 0, got {pixel_cache_mb!r}"
            )
        super().__init__(
            dict(test_datasets or {}),
            processor=base_model if processor is None else processor,
            clip_model=base_model if clip_model is None else clip_model,
            data_processor=data_processor,
            dataloader_kwargs=loader_settings(dataloader_kwargs),
            **{key: value for key, value in fusion_bench.items() if not key.startswith("_")},
        )
        self._tasks = tasks
        self.base_model = base_model
        self.pixel_cache_mb = pixel_cache_mb
        self._pixel_cache = PixelCache(pixel_cache_mb)
        self._heads: dict[str, Tensor] = {}
        self._definitions = parse_tasks(tasks)
        self._check_data()
        if getattr(rank_zero_only, "rank", 0) == 0:
            forget_stored_heads(self._definitions)
        self._open_tasks = {
            name: open_task(name, definition)
            for name, definition in self._definitions.items()
            if definition.data is not None
        }

    def _check_data(self) -> None:
        for name, definition in self._definitions.items():
            if (definition.data is None) == (name not in self._test_datasets):
                raise ValueError(
                    f"task {name!r} needs its data once: set either taskpool.tasks.{name}.data or "
                    f"taskpool.test_datasets.{name}."
                )
        if not self.task_names:
            raise ValueError("taskpool has no tasks: define them under taskpool.tasks.")

    @property
    def task_names(self) -> list[str]:
        """Names of all tasks, first from `test_datasets`, then from `tasks`."""
        return list(dict.fromkeys([*self._test_datasets, *self._definitions]))

    def setup(self) -> None:
        """Load processor, CLIP model and datasets. The first `evaluate` call does it.

        Raises:
            ValueError: If a task has no class names, or other ones than FusionBench.
            CalibrationError: If something cannot be loaded.
        """
        self.processor = load_part("taskpool.processor", self._processor, CLIPProcessor)
        images = self.processor if self._data_processor is None else self._data_processor
        self.data_processor = load_part("taskpool.data_processor", images, CLIPProcessor)
        # The head always computes in float32.
        self.clip_model = load_part(
            "taskpool.clip_model", self._clip_model, CLIPModel, dtype=torch.float32
        )
        self.clip_model.requires_grad_(False)
        self.clip_model.eval()
        self.clip_model.vision_model = nn.Identity()  # replaced by evaluated models
        self.clip_model.visual_projection.register_forward_pre_hook(_cast_inputs)
        for name, configured in self._test_datasets.items():
            definition = self._definitions.get(name, TaskDefinition())
            rows = build_part(f"taskpool.test_datasets.{name}", configured)
            self._open_tasks[name] = open_task(name, definition, rows)
        self.test_datasets = {
            name: EvaluationItems(self._open_tasks[name].items, self.data_processor)
            for name in self.task_names
        }
        self.test_dataloaders = {
            name: evaluation_loader(items, self._dataloader_kwargs)
            for name, items in self.test_datasets.items()
        }
        self._is_setup = True

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
        opened = self._open_tasks[task]
        if task not in self._heads:  # the text tower never changes
            model.set_classification_task(opened.classnames, list(opened.templates))
            self._heads[task] = model.zeroshot_weights
        model.zeroshot_weights = self._heads[task]
        batches = self._pixel_cache.batches(task, self.test_dataloaders[task])
        if self.fast_dev_run:
            batches = itertools.islice(batches, 1)
        self.on_task_evaluation_begin(model, task)
        with self.fabric.autocast():
            result = score(model, batches, task, opened.classnames, self._to_device)
        self.on_task_evaluation_end()
        return result

    def _to_device(self, tensor: Tensor) -> Tensor:
        return self.fabric.to_device(tensor) if self.move_to_device else tensor


def _cast_inputs(projection: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast features of a vision model of another dtype to the dtype of the head."""
    dtype = next(projection.parameters()).dtype
    return tuple(tensor.to(dtype) for tensor in inputs)
