"""Saving the model of `featcal calibrate` as a folder, with its card and report."""

from pathlib import Path
from typing import Any

from fusion_bench_featcal.files.json_files import json_text
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.inputs import write_inputs
from fusion_bench_featcal.folders.opened import Opened
from fusion_bench_featcal.folders.options import RECIPE
from fusion_bench_featcal.folders.writing import HEADS
from fusion_bench_featcal.models.saving import (
    CARD,
    CardFacts,
    card_text,
    writing_model,
    written_bytes,
)
from fusion_bench_featcal.results import write_run
from fusion_bench_featcal.run.result import CalibrationResult

REPORT = "featcal"
"""Folder of the report inside the model's folder."""
_HEADS = """
## Heads

Each task has a head of its own in `{heads}/NAME`. The folder itself loads with the head of {own}.

```python
from safetensors.torch import load_file
from transformers import AutoConfig, {kind}

head = "{heads}/NAME"
config = AutoConfig.from_pretrained(head, trust_remote_code=False)
model = {kind}.from_pretrained(".", config=config, ignore_mismatched_sizes=True)
model.load_state_dict(load_file(f"{{head}}/head.safetensors"), strict=False)
```
"""
"""End of the card of a classifier with heads."""


def save_folder(
    opened: Opened,
    result: CalibrationResult,
    weights: Any,
    facts: CardFacts,
    evaluation: Evaluation,
) -> None:
    """Save the calibrated model with heads, card and report, atomically.

    Args:
        opened: The models of the run.
        result: The calibration's log and reads.
        weights: The model's calibrated weights.
        facts: The model's origin.
        evaluation: The report, for the model card and `featcal/`, the experts' classifiers, whose
            heads are saved, and the digests of models and data.
    """
    request, report, heads = opened.request, evaluation.report, evaluation.heads
    advice = (
        "Make room and repeat the command with --resume: the finished blocks are in "
        f"{request.checkpoints}"
    )
    if heads:
        folder = request.folder
        print(f"heads: {folder / HEADS}/NAME. {folder} loads with that of {opened.own_head}")
    option, needed = f"--out {request.folder}", written_bytes(opened.size)
    with writing_model(request.folder, needed, option=option, advice=advice) as new:
        new.mkdir()
        opened.write(weights, heads, new)
        library, tags = opened.card_head(new)
        card = card_text(facts, request.base, request.expert, report, library, tags)
        if heads:
            inputs = "Image" if opened.title.startswith("image") else "Sequence"
            kind = f"AutoModelFor{inputs}Classification"
            card += _HEADS.format(heads=HEADS, own=opened.own_head, kind=kind)
        (new / CARD).write_text(card, encoding="utf-8")
        (new / RECIPE).write_text(request.recipe, encoding="utf-8")
        write_run(new / REPORT, report, "--out")
        write_inputs(new / REPORT, evaluation.digests)
        result.log.write(new / REPORT / "calibration_log.jsonl")
        (new / REPORT / "reads.json").write_text(json_text(result.reads), encoding="utf-8")


def is_complete(folder: Path, recipe: str) -> bool:
    """Return whether a folder already has the model of a recipe."""
    try:
        return (folder / RECIPE).read_text(encoding="utf-8") == recipe
    except OSError:
        return False
