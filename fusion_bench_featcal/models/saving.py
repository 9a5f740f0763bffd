"""Writing a model's folder: checks of the target, weights and configs."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.experts.pairing import embedding_of_head
from fusion_bench_featcal.families import head_of
from fusion_bench_featcal.files import free_space, link_or_copy, new_path
from fusion_bench_featcal.files.tensors import write_index, write_tensors
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.run.finished import FinishedBlocks

_FILE_ERRORS = (OSError, SafetensorError, RuntimeError)
LARGEST_FILE = 5 * 10**9
"""Largest number of bytes of a model that is saved as one file."""


def written_bytes(size: int) -> int:
    """Return the bytes that saving a calibrated model writes, given the model's bytes.

    The files of blocks become those of a larger model without being copied.
    """
    return size if size <= LARGEST_FILE else 0


@contextmanager
def writing_model(target: Path, needed: int, *, option: str, advice: str) -> Iterator[Path]:
    """Yield a temporary path for a model, which is moved to `target` after success.

    Args:
        target: The model's folder (or file), missing or empty.
        needed: Bytes of the model.
        option: The option with the target's value, for the message.
        advice: Sentences for the message about a full disk.

    Raises:
        CalibrationError: If the model cannot be written. The target is unchanged then.
    """
    try:
        if needed > free_space(target.parent):
            raise OSError("the disk does not have enough room")
        with new_path(target) as new:
            yield new
    except CalibrationError:  # a damaged block, which names its file
        raise
    except Exception as error:
        # Libraries in Rust, such as tokenizers, raise no other class for a full disk.
        if not isinstance(error, _FILE_ERRORS) and type(error) is not Exception:
            raise
        if target.is_dir() and any(target.iterdir()):
            message = f"{option} was written by another run in the meantime: name a new folder"
            raise CalibrationError(message) from error
        cause = getattr(error, "strerror", None) or first_line(error)
        raise CalibrationError(
            f"the model cannot be saved to {option}: {cause}. It needs {bytes_text(needed)}, but "
            f"{bytes_text(free_space(target.parent))} are free there. {advice}"
        ) from error


def write_shards(
    folder: Path, blocks: FinishedBlocks, outside_blocks: Mapping[str, Tensor]
) -> None:
    """Convert a model stored as files of its blocks to transformers' format.

    Args:
        folder: A folder without weights.
        blocks: Files of blocks. Above `LARGEST_FILE` bytes they become shards without changes.
        outside_blocks: The model's other tensors.

    Raises:
        OSError: If it cannot be written.
        CalibrationError: If a block is damaged.
    """
    names, memory_mapped = blocks.names(), blocks.memory_mapped()
    size = sum(map(blocks.nbytes, names)) + sum(tensor.nbytes for tensor in outside_blocks.values())
    if written_bytes(size):
        write_tensors(folder / "model.safetensors", {**memory_mapped, **outside_blocks})
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


def corrected_config(config: Mapping[str, object], model: Any) -> dict[str, object]:
    """Return the content of a model's config.json that any release of transformers reads.

    `auto_map` goes, because it names code of the original folder. `tie_word_embeddings` becomes
    false if the head is not tied: transformers 5 gives every T5 `true`, and older releases would
    then replace the head by the embeddings and rescale its input.
    """
    corrected = {name: value for name, value in config.items() if name != "auto_map"}
    head = head_of(model)
    if head is not None and head.weight is not embedding_of_head(model).weight:
        corrected["tie_word_embeddings"] = False
    return corrected


def correct_configs(model: object, folder: Path, *, skipped: str = "") -> None:
    """Correct the saved configs of a model, its processor and its generation.

    Args:
        model: The model.
        folder: Its folder.
        skipped: Name of a file that is correct already.
    """
    for file in (file for file in folder.glob("*config.json") if file.name != skipped):
        try:
            config = read_json(file)
        except ValueError:  # of another program
            continue
        corrected = corrected_config(config, model if file.name == "config.json" else None)
        if corrected != config:
            write_config(file, corrected)


def write_config(file: Path, config: Mapping[str, object]) -> None:
    """Write a config as transformers does."""
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
