"""Saving the model of `featcal calibrate` as a folder that plain transformers loads."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import nn

from fusion_bench_featcal.ending import NOTHING_SAVED
from fusion_bench_featcal.folders.adapter import ADAPTER, Adapter
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.options import RECIPE
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.log import CalibrationLog
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.saved_model import CardFacts, card_text, complete_folder, writing_model

REPORT = "featcal"
"""Folder of the report inside the model's."""
HEADS = "heads"


def save(
    models: Models,
    model: nn.Module,
    processor: Any,
    facts: CardFacts,
    report: Report,
    log: CalibrationLog,
    heads: Mapping[str, nn.Module],
    adapter: Adapter | None,
) -> None:
    """Save the calibrated model with heads, card and report, whole or not at all.

    Args:
        models: The models that it was made from.
        model: The calibrated model.
        processor: Tokenizer or image processor.
        facts: Its origin.
        report: The report, for the model card and `featcal/`.
        log: The log of the calibration, for `featcal/`.
        heads: Task -> its expert's classifier, whose head is saved.
        adapter: The model as an adapter over the base, saved beside it.
    """
    request, whole = models.request, _whole(models, model)
    advice = (
        "Make room and repeat the command with --resume: the finished blocks are in "
        f"{request.checkpoints}"
    )
    card = card_text(facts, request.base, request.expert, report)
    if heads:
        about = f"{request.folder / HEADS}/NAME (that of the model itself: {models.home.name}'s)"
        print(f"heads: {about}")
        card += f"\n## Heads\n\nEach task has a head of its own in `{HEADS}/NAME`.\n"
    option = f"--out {request.folder}"
    with writing_model(request.folder, whole, option=option, advice=advice) as new:
        _write_model(whole, heads, new, request.shard_size)
        if adapter is not None and models.base is not None:
            adapter.write(new / ADAPTER, models.base.kind, request.base)
        _write_processor(models, processor, new)
        complete_folder(new, whole, None, facts, card)
        (new / RECIPE).write_text(request.recipe, encoding="utf-8")
        report.write(new / REPORT, "--out")
        log.write(new / REPORT / "calibration_log.jsonl")


def is_saved(request: Request) -> bool:
    """Return whether the request's folder has its calibrated model already."""
    try:
        return (request.folder / RECIPE).read_text(encoding="utf-8") == request.recipe
    except OSError:
        return False


def how_to_go_on(request: Request) -> str:
    """Return what an interrupted run has left."""
    blocks = request.checkpoints
    if is_saved(request):
        return f"ended after saving: the model in {request.folder} is complete"
    if not blocks.is_dir() or not any(blocks.iterdir()):
        return NOTHING_SAVED
    return (
        f"ended before it was done: finished blocks are in {blocks}. To go on, repeat the command "
        "with --resume"
    )


def _write_model(
    whole: Any, heads: Mapping[str, Any], folder: Path, shard_size: str | None
) -> None:
    whole.save_pretrained(folder, **({"max_shard_size": shard_size} if shard_size else {}))
    for task, classifier in heads.items():
        head = folder / HEADS / task
        head.mkdir(parents=True)
        body = f"{classifier.base_model_prefix}."
        tensors = classifier.state_dict().items()
        outside = {n: t.cpu().contiguous() for n, t in tensors if not n.startswith(body)}
        save_file(outside, head / "head.safetensors")
        config = json.dumps(classifier.config.to_dict(), indent=2, sort_keys=True, default=str)
        (head / "config.json").write_text(config + "\n", encoding="utf-8")


def _write_processor(models: Models, processor: Any, folder: Path) -> None:
    """Save a tokenizer or image processor, in the files that it was loaded from where it has them.

    transformers 5 writes tokenizers that release 4 cannot load.
    """
    others = set(folder.iterdir())
    processor.save_pretrained(folder)
    source = Path(models.processor_folder)
    is_new_template = models.request.chat_template is not None
    for file in set(folder.iterdir()) - others:
        if (source / file.name).is_file() and not (is_new_template and file.suffix == ".jinja"):
            shutil.copyfile(source / file.name, file)


def _whole(models: Models, model: nn.Module) -> nn.Module:
    """The model that is saved: of a CLIP the whole one, where there is one, with the new tower."""
    home = models.home
    if home.kind != "clip" or home.architecture is type(model):
        return model
    whole = home.load(home.architecture)
    tower = {name.removeprefix("vision_model."): t for name, t in model.state_dict().items()}
    for name, tensor in whole.state_dict().items():
        if name.startswith("vision_model."):
            tensor.copy_(tower[name.removeprefix("vision_model.")])
    return whole
