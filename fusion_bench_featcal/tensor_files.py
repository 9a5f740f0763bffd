"""Safetensors files that are written atomically and read with a check of their digest."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_bench_featcal.digests import digest_file
from fusion_bench_featcal.files import ReportError, new_file, write_whole

INDEX = "model.safetensors.index.json"


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors. Shared memory counts once."""
    return sum({t.data_ptr() or id(t): t.nbytes for t in tensors if t is not None}.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a safetensors file atomically, and return the file's digest.

    Raises:
        OSError: If it cannot be written. The old file stays.
    """
    copies, stored = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # Safetensors refuses tensors that share memory, such as tied weights.
        copies[name] = tensor.clone() if storage in stored else tensor
        stored.add(storage)
    with new_file(path) as partial:
        try:
            save_file(copies, partial, {"format": "pt"})  # transformers requires the format
        except SafetensorError as error:
            raise OSError(str(error)) from error
        return digest_file(partial)


def write_index(folder: Path, files: Mapping[str, str], size: int) -> None:
    """Write the index of a model in several safetensors files, atomically.

    Args:
        folder: The folder of the files.
        files: Tensor -> name of its file.
        size: Bytes of all tensors.

    Raises:
        OSError: If it cannot be written. The old file stays.
    """
    index = {"metadata": {"total_size": size}, "weight_map": files}
    write_whole(folder / INDEX, json.dumps(index, indent=2).encode())


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """Read a file that `write_tensors` wrote, and compare its digest.

    Raises:
        ReportError: If the file is missing, has changed, or has no tensors.
    """
    try:
        if digest_file(path) != digest:
            raise ReportError(
                f"{path.name} has changed since it was written: its digest is another"
            )
        # Copies are aligned like new tensors. The rounding of products depends on alignment.
        return {name: tensor.clone() for name, tensor in load_file(path).items()}
    except OSError as error:
        raise ReportError(f"{path.name}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ReportError(f"{path.name} has no tensors: {error}") from error
