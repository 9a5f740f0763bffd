"""The merging method of `featcal calibrate --merge`, for models that stay in files."""

from collections.abc import Mapping

import torch

from fusion_bench_featcal.experts import LazyModel
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.request import SWUDI
from fusion_bench_featcal.models.merging import LOW_RANK, MergedOnRead, SwudiOnRead
from fusion_bench_featcal.results.notes import WARNING, Note

_LOW_RANK = (
    "the task vectors of {} have low rank, like those of merged LoRA adapters. --merge swudi can "
    "cost such experts 10 to 60 points: use --merge task_arithmetic:0.3"
)


def open_merged(
    inputs: InputModels,
    reference: LazyModel,
    base: LazyModel,
    experts: Mapping[str, LazyModel],
    family: Family,
) -> MergedOnRead:
    """Return the merged model, whose tensors are computed when they are read.

    Args:
        inputs: The models' folders.
        reference: The model with the names, shapes and dtypes of the merged one.
        base: The base.
        experts: Task -> expert.
        family: The family of the models.

    Raises:
        ValueError: If the method cannot merge adapters.
    """
    merger, models = inputs.request.merger, [*experts.values()]
    assert merger is not None  # as there is no merged model
    if merger.name != SWUDI:
        return MergedOnRead(reference, base, models, merger.scale)
    if adapters := [model.label for model in inputs.experts.values() if model.is_adapter]:
        raise ValueError(
            f"{adapters[0]} is an adapter. --merge swudi needs fully fine-tuned experts. With "
            "adapters it can be far worse than task arithmetic: use --merge task_arithmetic:0.3"
        )
    return SwudiOnRead(reference, base, models, family, torch.device(inputs.request.device))


def warnings_on_merger(merged: object, experts: Mapping[str, LazyModel]) -> list[Note]:
    """Warn about experts that the merging method may harm."""
    if not isinstance(merged, SwudiOnRead):
        return []
    few = [task for task, expert in experts.items() if merged.directions(expert) < LOW_RANK]
    return [Note(WARNING, _LOW_RANK.format(", ".join(few)))] if few else []
