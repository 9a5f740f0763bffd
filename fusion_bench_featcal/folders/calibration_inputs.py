"""The inputs that a repair was calibrated with, for programs that use the same ones later."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench_featcal.data.image_batches import ImageBatches
from fusion_bench_featcal.data.text_batches import TextBatches
from fusion_bench_featcal.data.text_samples import pad_samples
from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.folders.digests import changed_inputs, data_digests
from fusion_bench_featcal.folders.input_models import InputModels
from fusion_bench_featcal.folders.job import open_models_and_data
from fusion_bench_featcal.folders.options import RECIPE, WORDS
from fusion_bench_featcal.folders.read_request import read_request
from fusion_bench_featcal.folders.saving import REPORT
from fusion_bench_featcal.folders.screen import quiet
from fusion_bench_featcal.run.devices import isolated_torch_state


@using_vocabulary(WORDS)
@isolated_torch_state()
def calibration_inputs(recipe: str | Path, **options: Any) -> dict[str, list[Any]]:
    """Return the inputs that a repair reads, without padding and without augmented samples.

    Args:
        recipe: The folder of a repaired model, or a recipe.
        **options: Options that replace those of the recipe, as in `calibrate_folder`. For example,
            `device="cpu"` if experts that write answers shall run there.

    Returns:
        Task -> its samples, each a batch of one for the model: `input_ids` and `attention_mask`
        `[1, tokens]` and `labels` of texts, `pixel_values` `[1, channels, height, width]` of
        images. Samples of sentence-transformers models are texts.

    Raises:
        ValueError: If there was no calibration, or data changed since.
        CalibrationError: If models or data are missing.
    """
    path = Path(recipe).expanduser()
    folder = path if path.is_dir() else path.parent
    values = {"config": folder / RECIPE if path.is_dir() else path, **options, "plan": True}
    request = read_request(values, "calibration_inputs")
    if not request.calibrates:
        raise ValueError(f"{recipe} has no --data: its model was merged without samples")
    if changed := changed_inputs(folder / REPORT, data_digests(request)):
        raise ValueError(
            f"{', '.join(changed)} changed since the repair in {folder}: restore the data that the "
            "repair used"
        )
    with quiet():
        tasks = open_models_and_data(InputModels(request)).tasks
        return {name: _single_samples(task.batches) for name, task in tasks.items()}


def _single_samples(batches: Iterable[Any]) -> list[Any]:
    """Return batches of one sample each."""
    if isinstance(batches, TextBatches):  # answers are written in the batches of the run
        return [pad_samples([sample], batches.encoder) for sample in batches.encoded]
    if isinstance(batches, ImageBatches):
        batches = replace(batches, batch_size=1)
    return list(batches)
