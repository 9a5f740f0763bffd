"""`featcal calibrate`: models and data in folders, without FusionBench and without Hydra.

All functions here raise a ValueError that names the option if a named file or model is missing or
does not fit, and a CalibrationError if a calibration cannot go on.
"""

from pathlib import Path
from typing import Any

__all__ = ["calibrate_folder"]


def calibrate_folder(merged: str | Path | None = None, **options: Any) -> Path:
    """Calibrate a merged model in a folder or on the hub: `featcal calibrate` in Python.

    Args:
        merged: The merged model.
        options: The command's options by name, with _ for -: `expert={"math": "models/math"}`,
            `data={"math": "math.jsonl"}`, `out="repaired"`, `set={"samples_per_task": 64}`.
            `config="recipe.yaml"` reads the options of an earlier run.

    Returns:
        The folder of the calibrated model.

    Raises:
        ValueError: If an option is unknown, or models or data do not fit.
        CalibrationError: If a model is missing, or the calibration cannot go on. Finished blocks
            are kept. Messages of both name the command's options.
    """
    # Imported here, because the command line reads this package's options without loading torch.
    from fusion_bench_featcal.folders.job import run
    from fusion_bench_featcal.folders.request import Request

    return run(Request.of({"merged": merged, **options}, "calibrate_folder"))
