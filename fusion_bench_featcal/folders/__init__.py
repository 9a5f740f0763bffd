"""`featcal calibrate`: models and data in folders, without FusionBench and without Hydra.

If a named file or model is missing or does not fit, all functions here raise a ValueError that
names the option. If a calibration cannot go on, they raise a CalibrationError.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

if TYPE_CHECKING:
    from fusion_bench_featcal.folders.request import Request
    from fusion_bench_featcal.run.processes import Processes

__all__ = ["calibrate_folder"]


Location = str | Path
"""A file or folder, or an id of the hub."""


class FolderOptions(TypedDict, total=False):
    """The options of `Request` as typed keywords of `calibrate_folder`."""

    config: Location | None
    merge: str | None
    base: Location | None
    expert: Mapping[str, Location]
    data: Mapping[str, Location]
    columns: Mapping[str, str]
    eval: Mapping[str, Location]
    eval_rows: int
    no_eval: bool
    out: Location | None
    strict: bool
    preset: str
    set: Mapping[str, Any]
    tokenizer: Location | None
    chat_template: Location | None
    text_tower: Location | None
    prompt: Mapping[str, str]
    device: str
    push: str | None
    plan: bool
    resume: bool


def calibrate_folder(merged: Location | None = None, **options: Unpack[FolderOptions]) -> Path:
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
            are not removed. The messages of both errors name the command's options.

    Example:
        >>> calibrate_folder(
        ...     "merged",
        ...     base="base",
        ...     expert={"math": "models/math", "code": "models/code"},
        ...     data={"math": "math.jsonl", "code": "code.jsonl"},
        ...     out="repaired",
        ... )
    """
    from fusion_bench_featcal.folders.read_request import read_request

    return calibrate_request(read_request({"merged": merged, **options}, "calibrate_folder"))


def calibrate_request(request: "Request", processes: "Processes | None" = None) -> Path:
    """Calibrate the models of a request (`Request`), and return the folder of the result.

    Several processes share the calibration, and the first one does everything else. Models are
    looked up on the hub, and a login for `push`, before torch and transformers are imported, which
    takes seconds.

    Raises:
        ValueError: As `calibrate_folder`.
        CalibrationError: As `calibrate_folder`.
    """
    from fusion_bench_featcal.models.hub import hub_models

    if request.push:
        from fusion_bench_featcal.folders.pushing import check_push

        check_push(request.push)
    hub = hub_models(request.models) | hub_models(request.processors, weights=False)
    from fusion_bench_featcal.folders.job import run_job

    return run_job(request, hub, processes)
