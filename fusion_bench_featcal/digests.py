"""Digests of tensors, models, files and code, for comparing stored results."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.files import sha256_file

_SHORT = 32  # hexadecimal digits: 128 bits
_TRANSIENT = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def without_addresses(text: str) -> str:
    """Remove addresses of objects, which differ between processes."""
    return _ADDRESS.sub("", text)


def digest_text(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:_SHORT]


def digest_file(path: Path) -> str:
    """Return the digest of a file."""
    return sha256_file(path)[:_SHORT]


def digest_tensor(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and content."""
    digest = hashlib.sha256()
    _update(digest, "", tensor)
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


def describe_model(model: nn.Module) -> dict[str, Any]:
    """Return class, modules and config of a model. With the weights they define its function."""
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else None
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "modules": digest_text(without_addresses(repr(model))),
        "config": _plain(values),
        "attention": getattr(config, "_attn_implementation", None),
    }


def _plain(value: Any) -> Any:
    """Return a JSON form that is the same in every process."""
    text = json.dumps(value, default=lambda v: sorted(map(str, v)) if _is_set(v) else str(v))
    return json.loads(
        without_addresses(text),
        parse_constant=str,
        object_hook=lambda part: {k: v for k, v in part.items() if k not in _TRANSIENT},
    )


def _is_set(value: Any) -> bool:
    return isinstance(value, set | frozenset)


@cache
def describe_software(packages: tuple[str, ...], code: tuple[str, ...]) -> dict[str, str]:
    """Return versions of packages, and the digest of some of this package's files.

    Args:
        packages: Names of packages. Missing ones are recorded as "not installed".
        code: Files and folders of this package, relative to it.
    """
    root, digest = Path(__file__).parent, hashlib.sha256()
    for source in (root / name for name in sorted(code)):
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    versions = {package: _version(package) for package in packages}
    return versions | {"code": digest.hexdigest()[:_SHORT]}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
