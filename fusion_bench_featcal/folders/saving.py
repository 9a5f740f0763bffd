"""Saving the model of `featcal calibrate` as a folder in transformers' format."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.data.embeddings import FILES
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files.json_files import json_text
from fusion_bench_featcal.files.tensors import write_tensors
from fusion_bench_featcal.files.untrusted import parse_json, read_bytes
from fusion_bench_featcal.folders.evaluation import Evaluation
from fusion_bench_featcal.folders.inputs import write_inputs
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.folders.options import RECIPE
from fusion_bench_featcal.models.hub import MODULES
from fusion_bench_featcal.models.saving import (
    CARD,
    SENTENCES,
    TRANSFORMERS,
    CardFacts,
    card_tags,
    card_text,
    correct_configs,
    write_shards,
    writing_model,
    written_bytes,
)
from fusion_bench_featcal.results import write_run
from fusion_bench_featcal.run.result import CalibrationResult

REPORT = "featcal"
"""Folder of the report inside the model's folder."""
HEADS = "heads"


def save(
    models: Models,
    result: CalibrationResult,
    processor: Any,
    facts: CardFacts,
    evaluation: Evaluation,
) -> None:
    """Save the calibrated model with heads, card and report, atomically.

    Args:
        models: The models of the run.
        result: The calibration, whose folder has the model's calibrated part.
        processor: Tokenizer or image processor.
        facts: The model's origin.
        evaluation: The report, for the model card and `featcal/`, the experts' classifiers, whose
            heads are saved, and the digests of models and data.
    """
    request, report, heads = models.request, evaluation.report, evaluation.heads
    advice = (
        "Make room and repeat the command with --resume: the finished blocks are in "
        f"{request.checkpoints}"
    )
    library = SENTENCES if models.sentence_folder is not None else TRANSFORMERS
    tags = [] if models.merged is None else card_tags(models.merged.folder)
    card = card_text(facts, request.base, request.expert, report, library, tags)
    if heads:
        about = f"{request.folder / HEADS}/NAME (that of the model itself: {models.like.name}'s)"
        print(f"heads: {about}")
        card += f"\n## Heads\n\nEach task has a head of its own in `{HEADS}/NAME`.\n"
    option, needed = f"--out {request.folder}", written_bytes(models.like.size)
    with writing_model(request.folder, needed, option=option, advice=advice) as new:
        new.mkdir()
        _write_weights(models, result, new)
        _write_heads(models, heads, new)
        _write_processor(models, processor, new)
        if models.sentence_folder is not None:
            _copy_sentence_files(models.sentence_folder, new)
        correct_configs(models.like.whole, new)
        (new / CARD).write_text(card, encoding="utf-8")
        (new / RECIPE).write_text(request.recipe, encoding="utf-8")
        write_run(new / REPORT, report, "--out")
        write_inputs(new / REPORT, evaluation.digests)
        result.log.write(new / REPORT / "calibration_log.jsonl")
        (new / REPORT / "reads.json").write_text(json_text(result.reads), encoding="utf-8")


def is_saved(folder: Path, recipe: str) -> bool:
    """Return whether a folder already has the model of a recipe."""
    try:
        return (folder / RECIPE).read_text(encoding="utf-8") == recipe
    except OSError:
        return False


def _write_weights(models: Models, result: CalibrationResult, folder: Path) -> None:
    """Write config and weights, in one file up to 5 GB, else one for each block."""
    assert result.weights is not None
    like, calibrated = models.like, result.weights
    stored = like.source(models.base)
    if not isinstance(stored, SafetensorsExpert):  # transformers uses other names in files
        models.load(calibrated).save_pretrained(folder)  # type: ignore[operator]
        return
    for name in ("config.json", "generation_config.json"):
        if (like.folder / name).is_file():
            shutil.copyfile(like.folder / name, folder / name)
    keys = pair_names(like.label, stored, like.whole).values()
    outside_blocks = {key: stored.tensor(key) for key in keys if key not in calibrated.names()}
    # a classifier's head comes with its own tail, such as a pooler
    if models.has_heads and like.name in models.experts:
        of_body = pair_names(like.label, stored, models.empty_body)
        outside_blocks |= {of_body[name]: t for name, t in models.tail(like.name).items()}
    write_shards(folder, calibrated, outside_blocks)


def _write_heads(models: Models, heads: Mapping[str, Any], folder: Path) -> None:
    for task, classifier in heads.items():
        head = folder / HEADS / task
        head.mkdir(parents=True)
        body = f"{classifier.base_model_prefix}."
        tensors = classifier.state_dict().items()
        outside = {name: tensor for name, tensor in tensors if not name.startswith(body)}
        outside |= {f"{body}{name}": tensor for name, tensor in models.tail(task).items()}
        write_tensors(head / "head.safetensors", outside)
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


def _copy_sentence_files(source: Path, folder: Path) -> None:
    """Copy the files of sentence-transformers, and the folders of its modules without code."""
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for module in parse_json(read_bytes(source / MODULES), source / MODULES):
        path = source / module["path"]
        if path.is_dir() and path.resolve().parent == source.resolve():  # no path leads elsewhere
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("*.py"))
