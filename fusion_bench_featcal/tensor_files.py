"""Files of tensors that are whole or absent, and whose digest is known."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fusion_bench_featcal.digests import digest_file
from fusion_bench_featcal.files import ReportError, new_file


def stored_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of some tensors, those that share memory counted once."""
    return sum({t.data_ptr() or id(t): t.nbytes for t in tensors if t is not None}.values())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors to a safetensors file, whole or not at all; return the file's digest.

    Raises:
        OSError: It cannot be written; the old file stays.
    """
    # Copies: safetensors refuses tensors that share memory, and tied weights do.
    copies = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    with new_file(path) as partial:
        try:
            save_file(copies, partial, {"format": "pt"})  # without which transformers loads none
        except SafetensorError as error:
            raise OSError(str(error)) from error
        return digest_file(partial)


def read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    """Read the tensors of a file that `write_tensors` wrote.

    Raises:
        ReportError: The file is missing, another one, or holds no tensors.
    """
    try:
        if digest_file(path) != digest:
            raise ReportError(f"{path.name} is not the file that was kept: its digest is another")
        return load_file(path)
    except OSError as error:
        raise ReportError(f"{path.name}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ReportError(f"{path.name} holds no tensors: {error}") from error
