"""Writing a model in transformers' format: weights, heads, and tokenizer or image processor."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files.tensors import write_tensors
from fusion_bench_featcal.folders.model_folder import body_name
from fusion_bench_featcal.folders.models import Models
from fusion_bench_featcal.models.other_files import copy_other_files
from fusion_bench_featcal.models.saving import write_shards
from fusion_bench_featcal.run.finished import FinishedBlocks

HEADS = "heads"


def write_weights(models: Models, calibrated: FinishedBlocks, folder: Path) -> None:
    """Write config and weights, in one file up to 5 GB, else one for each block."""
    like = models.like
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


def write_heads(models: Models, heads: Mapping[str, Any], folder: Path) -> None:
    """Write the head of each expert's classifier, with its tail, to a folder of its own."""
    for task, classifier in heads.items():
        head = folder / HEADS / task
        head.mkdir(parents=True)
        body = f"{body_name(classifier)}."
        tensors = classifier.state_dict().items()
        outside = {name: tensor for name, tensor in tensors if not name.startswith(body)}
        outside |= {f"{body}{name}": tensor for name, tensor in models.tail(task).items()}
        write_tensors(head / "head.safetensors", outside)
        config = json.dumps(classifier.config.to_dict(), indent=2, sort_keys=True, default=str)
        (head / "config.json").write_text(config + "\n", encoding="utf-8")


def write_processor(models: Models, processor: Any, folder: Path) -> None:
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


def write_other_files(models: Models, folder: Path) -> None:
    """Copy small files that are not written here, such as a licence or `tokenizer.model`.

    Those of the tokenizer or image processor are in its folder, all others in the merged model's.
    """
    copy_other_files(Path(models.processor_folder), folder, of_processor=True)
    if models.merged is not None:
        copy_other_files(models.merged.folder, folder, of_processor=False)
