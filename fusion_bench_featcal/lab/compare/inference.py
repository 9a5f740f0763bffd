"""Time of a deployed model per test sample, relative to a reference model."""

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from fusion_bench import BaseTaskPool
from torch import Tensor, nn

from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.fusionbench.evaluation import task_names
from fusion_bench_featcal.lab.rivals.projection import project, to_unit_norm
from fusion_bench_featcal.tasks.text_generation import GREEDY, padded_left
from fusion_bench_featcal.tasks.text_pool import TextTaskPool, surgery_task

BATCH = 16
ANSWER = 8
"""Tokens of a timed answer, regardless of the model's end token."""
REPEATS = 60
# A large model on a CPU is timed less often.
BUDGET_SECONDS = 1.5

Work = Callable[[Any], object]


class Timed(NamedTuple):
    """Time of a model for one sample.

    Attributes:
        seconds: The time.
        relative: Ratio to the reference's time, whose batches alternate with the model's, or None
            if the device has no room for both.
    """

    seconds: float
    relative: float | None


def on_one_clock(times: Sequence[tuple[float, float]]) -> list[float]:
    """Return seconds per sample of all models, corrected for the speed of the machine.

    The machine's clock rate and its other programs change between models that are timed minutes
    apart. Ratios to the reference are unaffected. The reference's time is the median over all.

    Args:
        times: Each model's seconds, and its ratio to the reference.
    """
    reference = statistics.median(seconds / relative for seconds, relative in times)
    return [relative * reference for _, relative in times]


class InferenceTimer:
    """Times models on the same samples, the first of the first task.

    For images this is the time from pixel values to final image features, including a model's
    correction, but not reading images or comparing with text features. Language models write
    an answer of `ANSWER` tokens to each prompt, because answers of natural length take unequal
    times.
    """

    def __init__(
        self, taskpool: BaseTaskPool, fabric: Any, reference: Callable[[], nn.Module]
    ) -> None:
        """Set up the timer.

        Args:
            taskpool: The pool. FusionBench's CLIP task pools and ours can be timed.
            fabric: Lightning Fabric.
            reference: Loads a model of the same architecture, whose batches alternate with the
                batches of every timed model.
        """
        self._taskpool: Any = taskpool
        self._fabric = fabric
        self._reference = reference
        self._pixels: Tensor | None = None

    def time(self, model: nn.Module) -> Timed | None:
        """Return the median time of a batch of a just evaluated model, divided by the batch's size.

        None if the task pool has neither images with a visual projection nor texts.
        """
        task = next(iter(task_names(self._taskpool) or []), None)
        device = self._fabric.device
        timed = None if task is None else self._work(model, task, device)
        if timed is None:
            return None
        work, samples = timed
        models = [model.to(device).eval()]
        with contextlib.suppress(torch.OutOfMemoryError):  # the model is then timed alone
            models.append(self._reference().to(device).eval())
        times: list[list[float]] = [[] for _ in models]
        # The first runs warm up. There are at least two, however long they take.
        while len(times[0]) <= REPEATS and (
            len(times[0]) < 2 or sum(times[0][1:]) < BUDGET_SECONDS
        ):
            for timed_model, model_times in zip(models, times, strict=True):
                model_times.append(
                    self._seconds(lambda timed_model=timed_model: work(timed_model), device)
                )
        model_seconds, *reference = (model_times[1:] for model_times in times)
        pairs = zip(model_seconds, reference[0], strict=True) if reference else ()
        ratios = [first / second for first, second in pairs]
        relative = statistics.median(ratios) if ratios else None
        return Timed(statistics.median(model_seconds) / samples, relative)

    def _seconds(self, work: Callable[[], object], device: torch.device) -> float:
        _wait_for(device)
        start = time.perf_counter()
        with torch.no_grad(), self._fabric.autocast():
            work()
        _wait_for(device)
        return time.perf_counter() - start

    def _work(self, model: Any, task: str, device: torch.device) -> tuple[Work, int] | None:
        """Return the timed function and its number of samples, or None if unknown."""
        if isinstance(self._taskpool, TextTaskPool):
            return _answers(self._taskpool, model, task, device)
        projection = getattr(getattr(self._taskpool, "clip_model", None), "visual_projection", None)
        if self._pixels is None:
            self._pixels = _first_pixels(self._taskpool.test_dataloaders[task])
        if projection is None or self._pixels is None:
            return None
        pixels, projection = self._pixels.to(device), projection.to(device)
        return lambda tower: _final_features(tower, projection, pixels, task), len(pixels)


def _answers(
    taskpool: TextTaskPool, model: Any, task: str, device: torch.device
) -> tuple[Work, int]:
    """Return a function that answers the first prompts of a task, padded as for evaluation."""
    kind = "seq2seq" if model.config.is_encoder_decoder else "causal"
    encoder = TextEncoder(taskpool.tokenizer, kind, taskpool.max_length)
    rows = taskpool.test_dataloaders[task]
    prompts = [
        encoder.prompt(rows[n], f"{task}, {n}", ANSWER) for n in range(min(BATCH, len(rows)))
    ]
    ids, mask = (part.to(device) for part in padded_left(prompts, encoder.pad_id))

    def write(speaker: Any) -> None:
        with surgery_task(speaker, task):
            speaker.generate(
                input_ids=ids,
                attention_mask=mask,
                min_new_tokens=ANSWER,
                max_new_tokens=ANSWER,
                **GREEDY,
                pad_token_id=encoder.pad_id,
            )

    return write, len(prompts)


def _final_features(model: Any, projection: nn.Module, pixels: Tensor, task: str) -> Tensor:
    """Return the features that a classifier compares with text features."""

    def uncorrected(tower: nn.Module) -> Tensor:
        return to_unit_norm(project(tower(pixels), tower, projection))

    if not getattr(model, "is_surgery_model", False):
        return uncorrected(model)
    if hasattr(model, "features"):
        # One pass. FusionBench's protocol may need two.
        return to_unit_norm(model.features(task, pixels))
    return model.compute_surgery_features(uncorrected, dataset_name=task)[0]


def _first_pixels(loader: Any) -> Tensor | None:
    """Return the first test images as pixels `[batch, ...]`, or None for other kinds of items."""
    items = getattr(loader, "dataset", None)
    if items is None or len(items) == 0:
        return None
    pixels = []
    for index in range(min(BATCH, len(items))):
        item = items[index]
        if not isinstance(item, Sequence) or not isinstance(item[0], Tensor):
            return None
        pixels.append(item[0])
    return torch.stack(pixels) if len({part.shape for part in pixels}) == 1 else None


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
