"""Digests of tensors, inputs and texts, for comparing stored results."""

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.experts.source import ExpertSource, total_bytes

WHOLE = 10**9
"""Bytes of a model from which on only some rows of its matrices are read for a digest."""
ROWS = 16
_SHORT = 32  # hexadecimal digits: 128 bits
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def without_addresses(text: str) -> str:
    """Remove addresses of objects, which differ between processes."""
    return _ADDRESS.sub("", text)


def digest_text(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT]


def digest_tensor(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and content."""
    digest = hashlib.sha256()
    _update(digest, "", tensor)
    return digest.hexdigest()[:_SHORT]


def digest_model(source: ExpertSource) -> str:
    """Return a digest of names, shapes, dtypes and content of a model's tensors.

    Of matrices of a model of `WHOLE` bytes or more, some rows count, spread over each.
    """
    # A source that cannot read rows alone would read the whole tensor for each.
    is_whole = type(source).rows is ExpertSource.rows or total_bytes(source) < WHOLE
    digest = hashlib.sha256()
    for name in sorted(source.names()):
        shape = source.shape(name)
        digest.update(f"{name} {shape}\n".encode())
        if is_whole or len(shape) < 2:
            _update(digest, "", source.tensor(name))
        else:
            for row in sorted({number * (shape[0] - 1) // (ROWS - 1) for number in range(ROWS)}):
                _update(digest, str(row), source.rows(name, row, row + 1))
    return digest.hexdigest()[:_SHORT]


class InputsDigest:
    """Digest of a stream of model inputs."""

    def __init__(self) -> None:
        """Start without inputs."""
        self._digest = hashlib.sha256()

    def add(self, inputs: Any) -> None:
        """Add one batch: a tensor, or a mapping or tuple of tensors and plain values."""
        entries: Iterable[tuple[Any, Any]]
        if isinstance(inputs, Mapping):
            entries = sorted(inputs.items())
        else:
            entries = enumerate(inputs if isinstance(inputs, tuple) else (inputs,))
        self._digest.update(b"batch\n")
        for name, value in entries:
            if isinstance(value, Tensor):
                _update(self._digest, str(name), value)
            else:
                self._digest.update(f"{name} {without_addresses(repr(value))}\n".encode())

    def text(self) -> str:
        """Return the digest of all batches so far."""
        return self._digest.hexdigest()[:_SHORT]


def _update(digest: Any, name: str, tensor: Tensor) -> None:
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest.update(flat.view(torch.uint8).numpy())


def own_code(kind: type) -> str | None:
    """Return the source of a class that is not part of a package, which users change."""
    if kind.__module__.startswith("fusion_bench"):
        return None
    try:
        return Path(inspect.getsourcefile(kind) or "").read_text(encoding="utf-8")
    except (OSError, TypeError):  # typed at a prompt
        return None


@cache
def versions_of_software() -> str:
    """Return the versions of torch and transformers, and a digest of this package's code."""
    digest, root = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    packages = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return ", ".join([*packages, digest.hexdigest()[:_SHORT]])
