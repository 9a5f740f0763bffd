"""One `featcal calibrate`, from its request to the folder that it leaves."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fusion_bench_featcal.folders.job import Job
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.saving import is_saved
from fusion_bench_featcal.folders.screen import quiet, show_downloads


def calibrate_folder(merged: str | Path | None = None, **options: Any) -> Path:
    """Calibrate a merged model in a folder or on the hub: `featcal calibrate` in Python.

    Args:
        merged: The merged model, or the recipe.yaml of an earlier run.
        options: The command's options by name, with _ for -: `expert={"math": "models/math"}`,
            `data={"math": "math.jsonl"}`, `out="repaired"`, `set={"samples_per_task": 64}`.

    Returns:
        The folder of the calibrated model.

    Raises:
        ValueError: If an option is unknown, or models or data are missing or do not fit; nothing
            has been loaded then.
        CalibrationError: If the calibration cannot go on; finished blocks are kept.
    """
    return run(Request.of({"merged": merged, **options}, "calibrate_folder"))


def run(request: Request) -> Path:
    """Calibrate models in folders, and return the folder of the calibrated model.

    Raises:
        ValueError: If models or data are missing or do not fit; nothing has been loaded then.
        CalibrationError: If the calibration cannot go on; finished blocks are kept. `NotImproved`
            if a task ends no closer to its expert, with `strict`; nothing is saved.
    """
    blocks = request.checkpoints
    if (request.resume or blocks.is_dir()) and is_saved(request):
        shutil.rmtree(blocks, ignore_errors=True)
        print(f"{request.folder} is complete: this command saved it before")
        return request.folder
    request.check_folder()
    torch.empty(0, device=request.device)  # a device that cannot be used fails here
    try:
        with quiet():
            if request.plan and show_downloads(request):
                return request.folder
            job = Job.of(Models.of(request))
            job.show_start()
            return request.folder if request.plan else job.run()
    finally:
        with suppress(OSError):
            blocks.rmdir()  # if no block was finished
