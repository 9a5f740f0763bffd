"""Digests of tensors, inputs and code, for comparing stored results."""

import hashlib
import inspect
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path

from torch import Tensor
from xxhash import xxh3_128

from fusion_bench_featcal.files.tensors import update_digest

_SHORT = 32  # hexadecimal digits: 128 bits
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def without_addresses(text: str) -> str:
    """Remove addresses of objects, which differ between processes."""
    return _ADDRESS.sub("", text)


def digest_tensor(tensor: Tensor) -> str:
    """Return the digest of a tensor's dtype, shape and content."""
    digest = xxh3_128()
    update_digest(digest, tensor)
    return digest.hexdigest()


def digest_inputs(batches: Iterable[object]) -> str:
    """Return the digest of batches: tensors, or mappings or tuples of tensors and plain values."""
    digest = hashlib.sha256()
    for inputs in batches:
        values = inputs if isinstance(inputs, tuple) else (inputs,)
        entries = sorted(inputs.items()) if isinstance(inputs, Mapping) else enumerate(values)
        digest.update(b"batch\n")
        for name, value in entries:
            if isinstance(value, Tensor):
                update_digest(digest, value, str(name))
            else:
                digest.update(f"{name} {without_addresses(repr(value))}\n".encode())
    return digest.hexdigest()[:_SHORT]


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
