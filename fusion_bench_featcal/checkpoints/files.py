"""Checkpoint files: whole or absent, and every damage found when they are read."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from fusion_bench_featcal.files import remove_orphans, write_whole
from fusion_bench_featcal.settings import CalibrationError

_CHECKSUM = "checksum"
_LARGEST = 2**28  # bytes of a manifest; real ones have about 200 for each tensor


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file whole or not at all.

    Raises:
        CalibrationError: If it cannot be written.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise CalibrationError(
            f"cannot write the checkpoint {path}: {error.strerror or error}. It needs "
            f"{len(data) / 1e6:.3g} MB, and {_free(path)} are free. Make room or change "
            "method.checkpoint_dir; with method.resume=true a run goes on after its last whole "
            "block"
        ) from error


def _free(path: Path) -> str:
    try:
        return f"{shutil.disk_usage(path.parent).free / 1e6:.3g} MB"
    except OSError:  # the folder itself is gone
        return "0 MB"


def remove_partials(folder: Path) -> None:
    """Remove what killed processes of this host were writing."""
    for prefix in (".block-", ".run.json."):
        remove_orphans(folder, prefix)


def prepare_folder(folder: Path) -> None:
    """Make a folder, and see that files can be put into it.

    Raises:
        CalibrationError: If not.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CalibrationError(
            f"method.checkpoint_dir {folder} cannot be written: {error.strerror or error}. Choose "
            "another folder"
        ) from error


def write_manifest(path: Path, content: Mapping[str, Any]) -> str:
    """Write a JSON file that holds its own checksum; the checksum.

    Raises:
        CalibrationError: If it cannot be written.
    """
    checksum = _checksum(content)
    text = json.dumps({**content, _CHECKSUM: checksum}, indent=1)
    write_atomic(path, f"{text}\n".encode())
    return checksum


def read_manifest(path: Path) -> tuple[dict[str, Any], str]:
    """Read such a file: its content and its checksum.

    Raises:
        CalibrationError: If it is missing, damaged or edited.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise damaged(path, f"it is larger than {_LARGEST >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
        checksum = content.pop(_CHECKSUM, None) if isinstance(content, dict) else None
        expected = _checksum(content)
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise damaged(path, f"it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise damaged(path, "it holds no manifest")
    if checksum != expected:
        raise damaged(path, "its content does not match its checksum")
    return content, str(checksum)


def read_block_manifest(path: Path) -> dict[str, Any]:
    """Read a block's manifest.

    Raises:
        CalibrationError: If it is missing, damaged, edited or lacks something.
    """
    content, _ = read_manifest(path)
    reads, records = content.get("reads"), content.get("records")
    well = all(isinstance(content.get(key), str) for key in ("run", "block", "digest"))
    well = well and isinstance(reads, dict) and all(map(_is_texts, reads.values()))
    well = well and isinstance(records, list) and all(map(_is_record, records))
    if not well:
        raise damaged(path, "an entry is missing or of another type")
    return content


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _is_record(value: Any) -> bool:
    """Return whether a log record has what reports read of it."""
    if not isinstance(value, dict):
        return False
    kind = value.get("kind")
    numbers = {"task": ("samples", "expert_bytes"), "inputs": ("expert_bytes",)}
    numbers |= {"block": ("seconds",)}
    return isinstance(kind, str) and all(
        type(value.get(name)) in (int, float) for name in numbers.get(kind, ())
    )


def _checksum(content: Any) -> str:
    return digest(json.dumps(content, sort_keys=True).encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors; the digest of the file.

    Raises:
        CalibrationError: If they cannot be written.
    """
    data = safetensors.torch.save({n: t.detach().cpu().contiguous() for n, t in tensors.items()})
    write_atomic(path, data)
    return digest(data)


def read_tensors(path: Path, wanted: str) -> dict[str, Tensor]:
    """Read tensors from a file with a known digest.

    Raises:
        CalibrationError: If the file is missing or another one.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if digest(data) != wanted:
        raise damaged(path, "its content does not match its manifest's digest")
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"it holds no tensors ({error})") from error


def damaged(path: Path, reason: str) -> CalibrationError:
    """The error of a checkpoint file that must not be used."""
    block = path.name.startswith("block-")
    remedy = f"{path.with_suffix('.json')} to calibrate its block anew" if block else "that folder"
    return CalibrationError(
        f"the checkpoint {path} (method.checkpoint_dir) cannot be used: {reason}. Remove {remedy}"
        + (", or the whole folder to begin anew" if block else " to begin anew")
    )
