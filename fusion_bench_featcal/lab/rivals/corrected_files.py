"""Folders of models with corrections: the merged model, and one file with all corrections."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CLIPVisionModel,
)

from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.lab.rivals.correction_modules import AffineModule, SurgeryModule
from fusion_bench_featcal.lab.rivals.sites import CorrectedFeature, FinalState, ProjectedFeature
from fusion_bench_featcal.models.saving import correct_configs

CORRECTIONS = "corrections.safetensors"
VARIANT = "uncorrected"
"""Part of the name of the merged model's weight file, so that the folder does not load as a plain
model, which would silently omit the corrections."""


def save_corrected_model(model: Any, folder: str | Path, **kwargs: object) -> None:
    """Save a `CorrectedModel`. `kwargs` are those of the merged model's `save_pretrained`."""
    model.model.save_pretrained(folder, variant=VARIANT, **kwargs)
    correct_configs(model.model, Path(folder))
    state = model.state_dict()
    tensors = {n: state[n].contiguous() for n in state if not n.startswith("model.")}
    record = {"tasks": json.dumps(model.tasks), "final_norm": model.final_norm or ""}
    record["pooling"] = model.site.mode if isinstance(model.site, Pooling) else ""
    save_file(tensors, Path(folder) / CORRECTIONS, record)


def load_corrected_model(
    folder: str | Path, **kwargs: object
) -> tuple[nn.Module, dict[str, list[nn.Module]], CorrectedFeature]:
    """Load the arguments of a `CorrectedModel`: the merged model, the corrections and the feature.

    Raises:
        CalibrationError: If the folder has no such model, or the file is damaged.
    """
    try:
        with safe_open(Path(folder) / CORRECTIONS, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            record = file.metadata()
        tasks = json.loads(record["tasks"])
        corrections = dict(zip(tasks, _build_corrections(tensors), strict=True))
    except (OSError, SafetensorError, ValueError, LookupError, TypeError) as error:
        raise CalibrationError(
            f"{folder} contains no corrected model, or {CORRECTIONS} is damaged: {error!r}"
        ) from error
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    weight, pooling = tensors.get("projection.weight"), record.get("pooling")
    if weight is not None:
        projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        projection.weight = nn.Parameter(weight)
        site, loader = ProjectedFeature(projection), CLIPVisionModel
    elif pooling:
        site, loader = Pooling(pooling), AutoModel
    else:
        site = FinalState(record["final_norm"])
        loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    load: Any = loader.from_pretrained
    return load(folder, variant=VARIANT, trust_remote_code=False, **kwargs), corrections, site


def _build_corrections(tensors: Mapping[str, Tensor]) -> list[list[nn.Module]]:
    """Build the corrections of each task. The names of their tensors determine their classes."""
    parameters: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("corrections."):
            _, task, index, parameter = name.split(".")
            parameters.setdefault((int(task), int(index)), {})[parameter] = tensor
    corrections: dict[int, list[nn.Module]] = {}
    for task, index in sorted(parameters):
        values = parameters[task, index]
        module_class = AffineModule if "matrix" in values else SurgeryModule
        corrections.setdefault(task, []).append(module_class(**values))
    return list(corrections.values())
