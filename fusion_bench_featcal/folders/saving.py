"""Saving the model of `featcal calibrate` as a folder in transformers' format."""

import json
import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fusion_bench_featcal.experts.expert import aliases, pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files import link_or_copy
from fusion_bench_featcal.files.tensors import write_index, write_tensors
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.options import RECIPE
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.models.saving import CardFacts, card_text, complete_folder, writing_model
from fusion_bench_featcal.results import Run, write_run
from fusion_bench_featcal.run.ending import NOTHING_SAVED
from fusion_bench_featcal.run.problem import CalibrationResult

REPORT = "featcal"
"""Folder of the report inside the model's folder."""
HEADS = "heads"
LARGEST_FILE = 5 * 10**9
"""Largest number of bytes of a model that is saved as one file."""


def save(
    models: Models,
    result: CalibrationResult,
    processor: Any,
    facts: CardFacts,
    report: Run,
    heads: Mapping[str, nn.Module],
) -> None:
    """Save the calibrated model with heads, card and report, atomically.

    Args:
        models: The models of the run.
        result: The calibration, whose folder has the model's calibrated part.
        processor: Tokenizer or image processor.
        facts: The model's origin.
        report: The report, for the model card and `featcal/`.
        heads: Task -> its expert's classifier, whose head is saved.
    """
    request, whole = models.request, models.home.whole
    advice = (
        "Make room and repeat the command with --resume: the finished blocks are in "
        f"{request.checkpoints}"
    )
    card = card_text(facts, request.base, request.expert, report)
    if heads:
        about = f"{request.folder / HEADS}/NAME (that of the model itself: {models.home.name}'s)"
        print(f"heads: {about}")
        card += f"\n## Heads\n\nEach task has a head of its own in `{HEADS}/NAME`.\n"
    option, needed = f"--out {request.folder}", models.home.size
    with writing_model(request.folder, needed, option=option, advice=advice) as new:
        new.mkdir()
        write_weights(models, result, new)
        _write_heads(models, heads, new)
        _write_processor(models, processor, new)
        complete_folder(new, whole, None, facts, card)
        (new / RECIPE).write_text(request.recipe, encoding="utf-8")
        write_run(new / REPORT, report, "--out")
        result.log.write(new / REPORT / "calibration_log.jsonl")


def write_weights(models: Models, result: CalibrationResult, folder: Path) -> None:
    """Write config and weights, in one file up to 5 GB, else one for each block."""
    assert result.folder is not None
    home, calibrated = models.home, SafetensorsExpert(result.folder)
    stored = home.source(models.base)
    if not isinstance(stored, SafetensorsExpert):  # transformers uses other names in files
        models.load(calibrated).save_pretrained(folder)  # type: ignore[operator]
        return
    for name in ("config.json", "generation_config.json"):
        if (home.folder / name).is_file():
            shutil.copyfile(home.folder / name, folder / name)
    whole = home.whole.state_dict()
    keys = pair_names(home.name, "model", stored, whole, aliases(home.whole)).values()
    outside_blocks = {key: stored.tensor(key) for key in keys if key not in calibrated.names()}
    write_shards(folder, calibrated, outside_blocks, LARGEST_FILE)


def write_shards(
    folder: Path, blocks: SafetensorsExpert, outside_blocks: Mapping[str, Tensor], limit: int
) -> None:
    """Convert a model stored as files of its blocks to transformers' format.

    Args:
        folder: A folder without weights.
        blocks: Files of blocks. Above the limit they become shards without changes.
        outside_blocks: The model's other tensors.
        limit: Largest number of bytes of a model in one file.

    Raises:
        OSError: If it cannot be written.
    """
    names = blocks.names()
    size = sum(map(blocks.nbytes, names)) + sum(tensor.nbytes for tensor in outside_blocks.values())
    if size <= limit:
        # Memory-mapped, because the files belong to this run and are as large as the model.
        mapped = [load_file(file).items() for file in blocks.files]
        write_tensors(folder / "model.safetensors", dict(chain(*mapped, outside_blocks.items())))
        return
    files = blocks.files + ([None] if outside_blocks else [])
    weights = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        if file is None:
            write_tensors(folder / name, outside_blocks)
        else:
            link_or_copy(file, folder / name)
        weights |= dict.fromkeys(outside_blocks if file is None else blocks.names_in(file), name)
    write_index(folder, dict(sorted(weights.items())), size)


def is_saved(request: Request) -> bool:
    """Return whether the request's folder already has its calibrated model."""
    try:
        return (request.folder / RECIPE).read_text(encoding="utf-8") == request.recipe
    except OSError:
        return False


def how_to_go_on(request: Request) -> str:
    """Return the final message of an interrupted run."""
    blocks = request.checkpoints
    if is_saved(request):
        return f"ended after saving: the model in {request.folder} is complete"
    if not blocks.is_dir() or not any(blocks.iterdir()):
        return NOTHING_SAVED
    return (
        f"ended before it was done: finished blocks are in {blocks}. To go on, repeat the command "
        "with --resume"
    )


def _write_heads(models: Models, heads: Mapping[str, Any], folder: Path) -> None:
    for task, classifier in heads.items():
        head = folder / HEADS / task
        head.mkdir(parents=True)
        body = f"{classifier.base_model_prefix}."
        tensors = classifier.state_dict().items()
        outside = {n: t.cpu().contiguous() for n, t in tensors if not n.startswith(body)}
        outside |= {f"{body}{name}": tensor for name, tensor in models.tail(task).items()}
        save_file(outside, head / "head.safetensors")
        config = json.dumps(classifier.config.to_dict(), indent=2, sort_keys=True, default=str)
        (head / "config.json").write_text(config + "\n", encoding="utf-8")


def _write_processor(models: Models, processor: Any, folder: Path) -> None:
    """Save a tokenizer or image processor, by copying its original files if it has them.

    transformers 5 writes tokenizers that release 4 cannot load.
    """
    existing_files = set(folder.iterdir())
    processor.save_pretrained(folder)
    source = Path(models.processor_folder)
    is_new_template = models.request.chat_template is not None
    for file in set(folder.iterdir()) - existing_files:
        if (source / file.name).is_file() and not (is_new_template and file.suffix == ".jinja"):
            shutil.copyfile(source / file.name, file)
