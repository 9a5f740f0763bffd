"""Precision of torch's float32 matrix products, independent of the caller's global settings."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

EXACT = "ieee"

Backend = tuple[str, str]
_MATMULS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_CONVOLUTIONS = (("cudnn", "conv"), ("mkldnn", "conv"))
_PER_BACKEND = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and newer


@contextmanager
def exact_products(backends: Sequence[Backend] = _MATMULS) -> Iterator[None]:
    """Context without TF32 or bfloat16 in float32 products, by default those of matrices.

    torch raises if its older and its newer interface for this are mixed. The newer one also reads
    settings made by the older one, so it is used if torch has it.
    """
    if not _PER_BACKEND:
        with _exact_by_older_functions(backends):
            yield
        return
    before = {backend: _module(backend).fp32_precision for backend in backends}
    for backend in backends:
        _module(backend).fp32_precision = EXACT
    try:
        yield
    finally:
        for backend, precision in before.items():
            # "none" inherits from torch.backends.fp32_precision, and reads as the inherited value.
            _module(backend).fp32_precision = "none"
            if _module(backend).fp32_precision != precision:
                _module(backend).fp32_precision = precision


def convolving_as_multiplying() -> AbstractContextManager[None]:
    """Return a context in which convolutions use no lower precision than matrix products may use.

    cuDNN's convolutions use TF32 by default. A patch embedding would then be less precise than all
    other layers.
    """
    pairs = zip(_MATMULS, _CONVOLUTIONS, strict=True)
    return exact_products([conv for matmul, conv in pairs if precision_of(matmul) == EXACT])


def products_in_force() -> dict[str, str]:
    """Precision of float32 products by backend, for records of a run."""
    return {".".join(backend): precision_of(backend) for backend in (*_MATMULS, *_CONVOLUTIONS)}


def precision_of(backend: Backend) -> str:
    """Precision of one backend's float32 products: `ieee`, `tf32` or `bf16`."""
    if _PER_BACKEND:
        precision = _module(backend).fp32_precision
        return EXACT if precision == "none" else precision
    library, kind = backend
    if kind == "conv":
        return "tf32" if library == "cudnn" and torch.backends.cudnn.allow_tf32 else EXACT
    legacy = {"high": "tf32", "medium": "tf32" if library == "cuda" else "bf16"}
    return legacy.get(torch.get_float32_matmul_precision(), EXACT)


def _module(backend: Backend) -> Any:
    return getattr(getattr(torch.backends, backend[0]), backend[1])


@contextmanager
def _exact_by_older_functions(backends: Sequence[Backend]) -> Iterator[None]:
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if ("cuda", "matmul") in backends:
        torch.set_float32_matmul_precision("highest")
    if ("cudnn", "conv") in backends:
        torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv
