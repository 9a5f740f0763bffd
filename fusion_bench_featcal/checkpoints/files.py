"""Checkpoint files: whole or absent, and every damage found when they are read."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from fusion_bench_featcal.settings import CalibrationError

_CHECKSUM = "checksum"
_PARTIAL = ".part"


def digest(data: bytes | memoryview) -> str:
    """SHA-256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file beside its place, bring it to the disk, and move it into place.

    A process that is killed at any moment leaves the old file or the new one; a machine that loses
    power likewise, as far as its disk keeps what it says it has.

    Raises:
        CalibrationError: If it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{_PARTIAL}")
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise CalibrationError(
            f"cannot write the checkpoint {path}: {error.strerror or error}. Make room or change "
            "method.checkpoint_dir; with method.resume=true a run goes on after its last whole "
            "block"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Bring a folder's new entry to the disk, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_partials(folder: Path) -> None:
    """Remove what killed processes were writing."""
    for pattern in ("block-*", "run.json"):
        for partial in folder.glob(f".{pattern}.*{_PARTIAL}"):
            partial.unlink(missing_ok=True)


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
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is no JSON ({error})") from error
    if not isinstance(content, dict):
        raise damaged(path, "it holds no manifest")
    checksum = content.pop(_CHECKSUM, None)
    if checksum != _checksum(content):
        raise damaged(path, "its content does not match its checksum")
    return content, str(checksum)


def _checksum(content: Mapping[str, Any]) -> str:
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
    return safetensors.torch.load(data)


def damaged(path: Path, reason: str) -> CalibrationError:
    """The error of a checkpoint file that must not be used."""
    block = path.name.startswith("block-")
    remedy = f"{path.with_suffix('.json')} to calibrate its block anew" if block else "that folder"
    return CalibrationError(
        f"the checkpoint {path} (method.checkpoint_dir) cannot be used: {reason}. Remove {remedy}"
        + (", or the whole folder to begin anew" if block else " to begin anew")
    )
