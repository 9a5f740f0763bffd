"""Saving the model of `featcal calibrate` as a folder, with its card and report."""

from pathlib import Path

from fusion_bench_featcal.data.contents import list_files
from fusion_bench_featcal.files import digest_file
from fusion_bench_featcal.files.json_files import json_text
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.folders.digests import write_inputs
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.heads import HEADS
from fusion_bench_featcal.folders.options import RECIPE
from fusion_bench_featcal.models.cards import CARD, card_text
from fusion_bench_featcal.models.saving import writing_model, written_bytes
from fusion_bench_featcal.results import accuracy_frame, write_run
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.run.result import CalibrationResult

REPORT = "featcal"
"""Folder of the report inside the model's folder."""
FILE_DIGESTS = f"{REPORT}/files.json"
"""File in the model's folder: name of every other saved file but the card -> its digest."""
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


def save_folder(result: CalibrationResult, facts: Facts, evaluation: Evaluation) -> None:
    """Save the calibrated model with heads, card and report, atomically.

    Args:
        result: The calibration.
        facts: Its settings, samples, numbers, and modules that were not calibrated.
        evaluation: The report, for the model card and `featcal/`, the experts' classifiers, whose
            heads are saved, and the digests of models and data.
    """
    request, report, models = evaluation.request, evaluation.report, evaluation.opened.models
    folder, blocks = request.folder, request.blocks_folder
    advice = f"Make room and repeat the command with --resume: the finished blocks are in {blocks}"
    option, needed = f"--out {folder}", written_bytes(models.merged_bytes)
    name = evaluation.row
    frame, merger = accuracy_frame(report), {"merged model": request.merged or request.merge}
    with writing_model(folder, needed, option=option, advice=advice) as new:
        new.mkdir()
        head = models.write_calibrated(result, new, evaluation.heads)
        card = card_text(
            name,
            facts,
            request.base,
            request.expert,
            frame,
            scores=evaluation.scores,
            merger=merger,
            datasets=request.data.values(),
            head=head,
        )
        if models.heads is not None:
            own = models.heads.saved_name
            print(f"heads: {folder / HEADS}/NAME. {folder} loads with the head of {own}")
            inputs = "Image" if models.title.startswith("image") else "Sequence"
            kind = f"AutoModelFor{inputs}Classification"
            card += _HEADS.format(heads=HEADS, own=own, kind=kind)
        (new / CARD).write_text(card, encoding="utf-8")
        (new / RECIPE).write_text(request.recipe, encoding="utf-8")
        write_run(new / REPORT, report, "--out", frame)
        write_inputs(new / REPORT, evaluation.digests)
        result.log.write(new / REPORT / "calibration_log.jsonl")
        (new / REPORT / "reads.json").write_text(json_text(result.reads), encoding="utf-8")
        # The card is not listed, because users edit it.
        written = {name: digest_file(new / name) for name in list_files(new) if name != CARD}
        (new / FILE_DIGESTS).write_text(json_text(written), encoding="utf-8")


def is_complete(folder: Path, recipe: str) -> bool:
    """Return whether a folder already has the model of a recipe."""
    file = folder / RECIPE
    return file.is_file() and file.read_text(encoding="utf-8") == recipe


def damaged_files(folder: Path) -> list[str]:
    """Return the files of a saved model that are not as they were saved. Others may be there.

    Raises:
        ValueError: If the file with the digests is damaged.
    """
    file = folder / FILE_DIGESTS
    written = read_json(file) if file.is_file() else {FILE_DIGESTS: ""}
    return [name for name, digest in written.items() if digest_file(folder / name) != digest]
