"""Precision in which torch multiplies float32 numbers, whatever the caller allows elsewhere."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

EXACT = "ieee"

Backend = tuple[str, str]
_MATMULS = (("cuda", "matmul"), ("mkldnn", "matmul"))
_CONVOLUTIONS = (("cudnn", "conv"), ("mkldnn", "conv"))
_PER_BACKEND = hasattr(torch.backends.cuda.matmul, "fp32_precision")  # torch 2.9 and newer


@contextmanager
def exact_products() -> Iterator[None]:
    """Context without TF32 or bfloat16 short cuts in float32 matrix products."""
    with multiplying_in(EXACT):
        yield


@contextmanager
def multiplying_in(precision: str) -> Iterator[None]:
    """Context in which CUDA multiplies float32 matrices in `ieee` or `tf32`; CPUs do it exactly."""
    with _allowing(dict(zip(_MATMULS, (precision, EXACT), strict=True))):
        yield


@contextmanager
def convolving_as_multiplying() -> Iterator[None]:
    """Context in which convolutions take no short cut that matrix products may not take.

    cuDNN's convolutions are TF32 by default, so that a patch embedding would not be the float32
    that everything else is.
    """
    pairs = zip(_MATMULS, _CONVOLUTIONS, strict=True)
    with _allowing({conv: EXACT for matmul, conv in pairs if precision_of(matmul) == EXACT}):
        yield


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


@contextmanager
def _allowing(precisions: Mapping[Backend, str]) -> Iterator[None]:
    """Context with these precisions by backend.

    torch refuses to mix its two ways of setting them. The one by backend also understands what was
    set by the older one; where torch lacks it, only the older one exists.
    """
    if not _PER_BACKEND:
        with _allowing_by_older_functions(precisions):
            yield
        return
    before = {backend: _module(backend).fp32_precision for backend in precisions}
    for backend, precision in precisions.items():
        _module(backend).fp32_precision = precision
    try:
        yield
    finally:
        for backend, precision in before.items():
            # "none" inherits from torch.backends.fp32_precision, and reads as what it inherits.
            _module(backend).fp32_precision = "none"
            if _module(backend).fp32_precision != precision:
                _module(backend).fp32_precision = precision


def _module(backend: Backend) -> Any:
    return getattr(getattr(torch.backends, backend[0]), backend[1])


@contextmanager
def _allowing_by_older_functions(precisions: Mapping[Backend, str]) -> Iterator[None]:
    matmul, conv = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if ("cuda", "matmul") in precisions:
        is_short = precisions["cuda", "matmul"] == "tf32"
        torch.set_float32_matmul_precision("high" if is_short else "highest")
    if ("cudnn", "conv") in precisions:
        torch.backends.cudnn.allow_tf32 = precisions["cudnn", "conv"] == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = conv
