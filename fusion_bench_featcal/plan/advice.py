"""Settings that lower a calibration's memory, for messages."""

from collections.abc import Mapping
from typing import Any

from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.plan.dry_run import dry_run, without_masks
from fusion_bench_featcal.plan.estimate import memory_of

GENERAL = (
    "Lower method.batch_size or method.samples_per_task, or set method.activations=disk or "
    "method.stream_experts=true"
)
LABELS = {
    "model": "calibrated copy of the model",
    "experts": "models loaded whole",
    "activations": "features of all samples",
    "batch": "one batch in a block",
    "statistics": "sums and systems of a block",
    "block": "an expert's block, anchors, new parameters",
}
"""Parts of a calibration's memory, for people."""

_SETTINGS = {
    "activations": "method.activations=disk or a lower method.samples_per_task",
    "batch": "a lower method.batch_size",
    "experts": "method.stream_experts=true",
    "statistics": "method.modules without the widest modules",
}


def memory_advice(problem: Any, example: Any) -> str:
    """Return a sentence that names the settings for the largest parts of a calibration's memory.

    Args:
        problem: An `engine.problem.Problem`.
        example: The first batch's inputs, without their entries.
    """
    try:
        settings, tasks = problem.settings.replace(family=problem.family), len(problem.tasks)
        model = hollow_copy(problem.model).to("meta")
        run = dry_run(model, without_masks(example), settings, tasks)
        samples = len(problem.experts) * settings.samples_per_task
        parts, _ = memory_of(run, settings, samples, tasks)
        return advice(parts, on_disk=settings.activations == "disk")
    except Exception:  # whatever it is, the error at hand is the one to report
        return GENERAL


def advice(parts: Mapping[str, int], *, on_disk: bool) -> str:
    """Return a sentence that names the settings for the largest parts, by bytes of each part."""
    found = [name for name in _SETTINGS if parts[name] and not (on_disk and name == "activations")]
    largest = sorted(found, key=lambda name: -parts[name])[:3]
    named = [f"{LABELS[name]}, {size(parts[name])} ({_SETTINGS[name]})" for name in largest]
    return f"What settings lower, the largest first: {'; '.join(named)}"


def size(count: float) -> str:
    """Bytes for people."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= step:
            return f"{count / step:.{2 if count < 10 * step else 1}f} {unit}"
    return f"{count / 1024:.0f} KiB"
