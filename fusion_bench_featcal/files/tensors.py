"""Safetensors files that are written atomically."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fusion_bench_featcal.files import new_file, write_whole

INDEX = "model.safetensors.index.json"


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors. Shared memory counts once."""
    return sum({t.data_ptr() or id(t): t.nbytes for t in tensors if t is not None}.values())


def update_digest(digest: Any, tensor: Tensor, name: str = "") -> None:
    """Add a tensor's name, dtype, shape and content to a digest of `hashlib` or `xxhash`."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy())


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors with texts to a safetensors file atomically.

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
        partial.touch()
        mode = partial.stat().st_mode  # safetensors writes files that only their owner can read
        try:
            # transformers requires the format
            save_file(copies, partial, {"format": "pt", **(metadata or {})})
            partial.chmod(mode)
        except SafetensorError as error:
            raise OSError(str(error)) from error


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
