"""Conversion of hub models that only have `.bin` files to safetensors files, done once."""

import json
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from pickle import UnpicklingError
from zipfile import is_zipfile

import torch
from safetensors.torch import save_file
from torch import Tensor

from fusion_bench_featcal.error_block import first_line
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.files import replacing
from fusion_bench_featcal.untrusted import read_json

INDEX = "model.safetensors.index.json"


def convert(folder: Path, names: Iterable[str], target: Path) -> None:
    """Copy a model's files to another folder atomically, with weights in safetensors.

    Args:
        folder: The model's folder.
        names: The files that are needed.
        target: The new folder.

    Raises:
        CalibrationError: If a `.bin` file has content other than tensors, which is not unpickled.
        OSError: If a file cannot be written.
    """
    weight_map: dict[str, str] = {}
    tied = _tied_names(folder)
    with replacing(target) as new:
        new.mkdir()
        for name in names:
            if not name.endswith(".bin"):
                shutil.copyfile(folder / name, new / name)
                continue
            tensors = _unshared(_read(folder / name), tied)
            file = name.removesuffix(".bin").replace("pytorch_model", "model") + ".safetensors"
            save_file(tensors, new / file, {"format": "pt"})
            weight_map |= dict.fromkeys(tensors, file)
        if any("-of-" in file for file in weight_map.values()):
            index = {"metadata": {}, "weight_map": weight_map}
            (new / INDEX).write_text(json.dumps(index))


def _read(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, memory-mapped if its format allows it."""
    try:
        content = torch.load(file, "cpu", weights_only=True, mmap=is_zipfile(file))
    except (UnpicklingError, RuntimeError, ValueError, EOFError, LookupError) as error:
        raise CalibrationError(
            f"{file.name} is damaged, or holds more than tensors, which alone are read: "
            f"{first_line(error)}"
        ) from error
    if not isinstance(content, Mapping):
        raise CalibrationError(f"{file.name} holds no tensors by name")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _unshared(tensors: Mapping[str, Tensor], tied: re.Pattern[str] | None) -> dict[str, Tensor]:
    """Return tensors without shared memory, which safetensors refuses.

    A tied matrix keeps only the name under which transformers saves it. Other tensors are copied.
    """
    unshared: dict[str, Tensor] = {}
    storages = set()
    for name in sorted(tensors, key=lambda name: bool(tied and tied.search(name))):
        tensor = tensors[name]
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages and tied and tied.search(name):
            continue
        unshared[name] = tensor.clone() if storage in storages else tensor.contiguous()
        storages.add(storage)
    return unshared


def _tied_names(folder: Path) -> re.Pattern[str] | None:
    """Return a pattern of the names that the model's class ties to others, or None."""
    import transformers

    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):  # an adapter's config, or one that is refused later
        return None
    kind = getattr(transformers, str(next(iter(config.get("architectures") or [""]))), None)
    names = list(getattr(kind, "_tied_weights_keys", None) or ())
    if config.get("tie_word_embeddings") is False or not names:
        return None
    return re.compile("|".join(f"(?:{name})" for name in names))
