"""`ClipTaskPool`: FusionBench's CLIP task pool with tasks that YAML alone can define."""

import itertools
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import CLIPModel, CLIPProcessor

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench.models.hf_clip import HFCLIPClassifier
from fusion_bench.taskpool import CLIPVisionModelTaskPool

from fusion_bench_featcal.nearest_names import refuse_unknown_keys
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.tasks.definition import (
    OpenTask,
    TaskDefinition,
    background_of,
    check_background,
    open_task,
    parse_tasks,
)
from fusion_bench_featcal.tasks.heads import forget_stored_heads
from fusion_bench_featcal.tasks.pool_settings import (
    build_part,
    evaluation_report,
    load_part,
    refuse_unknown_pool_keys,
)
from fusion_bench_featcal.tasks.scoring import (
    Batch,
    EvaluationItems,
    PixelCache,
    Score,
    evaluation_loader,
    loader_settings,
    score,
)

log = logging.getLogger(__name__)


class ClipTaskPool(CLIPVisionModelTaskPool):
    """Evaluates CLIP vision models, zero-shot, on FusionBench's tasks or on one's own.

    It takes the keys of FusionBench's `CLIPVisionModelTaskPool` and gives the same accuracies.
    Besides: tasks can be defined in YAML, unknown keys are refused, pictures are processed once
    for several models, the correctness of every test item is kept, and no report files are
    written. With several processes each evaluates everything, so that all of them hold the same
    result.

    Attributes:
        item_correct: Of the last `evaluate` call: task name -> bool tensor `[test items]`, in the
            order of the data set, on the CPU. Its mean is the accuracy.
        item_classes: Task name -> class of each test item, of the tasks evaluated so far.
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
        """Check the settings and the data of the tasks defined here, before any model is loaded.

        Args:
            test_datasets: Task name -> data set or its configuration (FusionBench's way).
            tasks: Task name -> the keys of `TaskDefinition`.
            base_model: CLIP model, a folder or hub id, that `processor` and `clip_model` default
                to.
            processor: CLIP processor or its configuration; prepares images and prompts.
            clip_model: CLIP model (or its configuration) whose text tower gives the heads.
            data_processor: Prepares images instead of `processor`: a transformers processor, or a
                callable from an RGB picture to a tensor `[channels, height, width]`.
            dataloader_kwargs: For `torch.utils.data.DataLoader` (batches of 128 unless given).
            pixel_cache_mb: Memory for processed pictures kept between `evaluate` calls, in MiB; a
                task that does not fit is processed again each time.
            **fusion_bench: Further keys of FusionBench's pool; `fast_dev_run` evaluates on one
                batch a task. Others are refused.

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
            processor=base_model if processor is None else processor,  # type: ignore[arg-type]
            clip_model=base_model if clip_model is None else clip_model,  # type: ignore[arg-type]
            data_processor=data_processor,
            dataloader_kwargs=loader_settings(dataloader_kwargs),  # type: ignore[arg-type]
            **{key: value for key, value in fusion_bench.items() if not key.startswith("_")},
        )
        self._tasks = tasks
        self.base_model = base_model
        self.pixel_cache_mb = pixel_cache_mb
        self.item_correct: dict[str, Tensor] = {}
        self.item_classes: dict[str, list[str]] = {}
        self._pixel_cache = PixelCache(pixel_cache_mb)
        self._heads: dict[str, Tensor] = {}
        self._open_tasks = self._open_defined_tasks(parse_tasks(tasks))

    def _open_defined_tasks(self, definitions: dict[str, TaskDefinition]) -> dict[str, OpenTask]:
        self._definitions = definitions
        for name, definition in definitions.items():
            if (definition.data is None) == (name not in self._test_datasets):
                raise ValueError(
                    f"task {name!r} needs its data once: set either taskpool.tasks.{name}.data or "
                    f"taskpool.test_datasets.{name}."
                )
        if not definitions and not self._test_datasets:
            raise ValueError("taskpool has no tasks: define them under taskpool.tasks.")
        if getattr(rank_zero_only, "rank", 0) == 0:
            forget_stored_heads(definitions)
        return {
            name: open_task(name, definition)
            for name, definition in definitions.items()
            if definition.data is not None
        }

    def check_backgrounds(self, modelpool: Any) -> None:
        """Refuse calibration images that are composited on another colour than test images.

        Raises:
            ValueError: If a task's two colours differ.
        """
        declared = {task: entry.background for task, entry in self._definitions.items()}
        for task in self.task_names:
            data = self._test_datasets.get(task)
            check_background(task, declared.get(task) or background_of(data), modelpool)

    @property
    def task_names(self) -> list[str]:
        """Names of all tasks: those of `test_datasets`, then those defined under `tasks`."""
        return list(dict.fromkeys([*self._test_datasets, *self._definitions]))

    def setup(self) -> None:
        """Load processor, CLIP model and data sets; `evaluate` does it when first called.

        Raises:
            ValueError: If a task has no class names, or other ones than FusionBench.
            CalibrationError: If something cannot be loaded, naming it and the setting.
        """
        self.processor = load_part("taskpool.processor", self._processor, CLIPProcessor)
        own = self.processor if self._data_processor is None else self._data_processor
        self.data_processor = load_part("taskpool.data_processor", own, CLIPProcessor)
        # the head computes in float32 whatever the files hold
        self.clip_model = load_part(
            "taskpool.clip_model", self._clip_model, CLIPModel, dtype=torch.float32
        )
        self.clip_model.requires_grad_(False)
        self.clip_model.eval()
        self.clip_model.vision_model = nn.Identity()  # evaluated models take its place
        self.clip_model.visual_projection.register_forward_pre_hook(_in_own_dtype)
        for name, configured in self._test_datasets.items():
            definition = self._definitions.get(name, TaskDefinition())
            rows = build_part(f"taskpool.test_datasets.{name}", configured)
            self._open_tasks[name] = open_task(name, definition, rows)
        self.test_datasets = {
            name: EvaluationItems(self._open_tasks[name].items, self.data_processor)
            for name in self.task_names
        }
        self.test_dataloaders: dict[str, DataLoader[Batch]] = {
            name: evaluation_loader(items, self._dataloader_kwargs)
            for name, items in self.test_datasets.items()
        }
        self._is_setup = True

    def evaluate(self, model: nn.Module, name: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Measure a model's accuracy on the tasks, and keep which test items it got right.

        Returns:
            `{"model_info": {...}, <task>: {"accuracy", "loss"}, "average": {"accuracy", "loss"}}`,
            for the tasks in `test_dataloaders`.

        Raises:
            CalibrationError: If data cannot be read or the model's output is not finite.
        """
        refuse_unknown_keys(kwargs, ["model", "name"], "evaluate")
        if not self._is_setup:
            self.setup()
        self.item_correct = {}
        scores = self._scores(model)
        self.item_correct = {task: result.correct for task, result in scores.items()}
        for task, result in scores.items():
            names = self._open_tasks[task].classnames
            self.item_classes[task] = [names[label] for label in result.labels.tolist()]
        measured = {t: {"accuracy": r.accuracy, "loss": r.loss} for t, r in scores.items()}
        report = evaluation_report(model, name, measured)
        log.debug("evaluation result: %s", report)
        return report

    def _scores(self, model: nn.Module) -> dict[str, Score]:
        self.clip_model.vision_model = model
        classifier = HFCLIPClassifier(self.clip_model, processor=self.processor)
        if self.move_to_device:
            self.fabric.to_device(classifier)
        classifier.eval()
        try:
            return {
                task: self._score(classifier, task)
                for task in progress_bar(
                    list(self.test_dataloaders), what="evaluating", unit="task"
                )
            }
        finally:
            self.clip_model.vision_model = nn.Identity()  # lets go of the evaluated model

    def _score(self, classifier: HFCLIPClassifier, task: str) -> Score:
        self._set_head(classifier, task)
        batches = self._pixel_cache.batches(task, self.test_dataloaders[task])
        if self.fast_dev_run:
            batches = itertools.islice(batches, 1)
        self.on_task_evaluation_begin(classifier, task)
        with self.fabric.autocast():
            result = score(classifier, batches, task, self._to_device)
        self.on_task_evaluation_end()
        return result

    def _set_head(self, classifier: HFCLIPClassifier, task: str) -> None:
        """Set the task's zero-shot head, computed once: the text tower never changes."""
        if task not in self._heads:
            opened = self._open_tasks[task]
            classifier.set_classification_task(opened.classnames, list(opened.templates))
            self._heads[task] = classifier.zeroshot_weights
        classifier.zeroshot_weights = self._heads[task]

    def _to_device(self, tensor: Tensor) -> Tensor:
        return self.fabric.to_device(tensor) if self.move_to_device else tensor


def _in_own_dtype(projection: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Let a vision model of another dtype than the head's be evaluated."""
    dtype = next(projection.parameters()).dtype
    return tuple(tensor.to(dtype) for tensor in inputs)
