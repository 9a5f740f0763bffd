"""Choice of the library that multiplies float32 matrices on the CPU: MKL or oneDNN.

On AMD processors MKL does not use AVX-512, and oneDNN is about twice as fast. On Intel processors
the two are equally fast. oneDNN is reached through a private operator of torch. If that operator is
missing or gives wrong results, torch's default is used.
"""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

TORCH, ONEDNN = "torch", "onednn"

SLOW_WITH_MKL = "AuthenticAMD AVX512"
"""Processor, as of `processor`, on which oneDNN was measured to be 2.2 times as fast as MKL."""

_kernel: ContextVar[str] = ContextVar("kernel", default=TORCH)


def choose_kernel(device: torch.device) -> str:
    """Return the kernel of a run: `onednn` on CPUs on which it is faster, else `torch`."""
    is_slow = torch.backends.mkl.is_available() and processor() == SLOW_WITH_MKL
    return ONEDNN if device.type == "cpu" and is_slow and onednn_works() else TORCH


def agreed_kernel(chosen: Sequence[str]) -> str:
    """Return the kernel for several processes, given each process's choice."""
    return ONEDNN if set(chosen) == {ONEDNN} else TORCH


@cache
def onednn_works() -> bool:
    """Return whether torch's oneDNN operator exists and gives correct products."""
    generator = torch.Generator().manual_seed(0)  # does not change the caller's random state
    random = partial(torch.randn, generator=generator, dtype=torch.float32)
    x, weight, bias = random((3, 5, 7)), random((4, 7)), random((4,))
    try:
        product = onednn_linear(x, weight, bias)
        return bool(torch.allclose(product, functional.linear(x, weight, bias), atol=1e-5))
    except (RuntimeError, AttributeError, TypeError):  # no such operator, or another signature
        return False


@cache
def processor() -> str:
    """Vendor of the CPU, and the vector instructions that torch uses on it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    vendors = [line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")]
    vendor = vendors[0] if vendors else platform.processor().rpartition(" ")[2] or "unknown"
    return f"{vendor} {torch.backends.cpu.get_cpu_capability()}"


@contextmanager
def using_kernel(kernel: str) -> Iterator[None]:
    """Context in which sums over rows use a kernel."""
    token = _kernel.set(kernel)
    try:
        yield
    finally:
        _kernel.reset(token)


def with_kernel(
    kernel: str, context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[Any]]:
    """Wrap a context for forward passes so that linear maps use a kernel.

    Args:
        kernel: `torch` or `onednn`.
        context: Returns the context to wrap (Fabric's autocast).
    """
    if kernel == TORCH:
        return context

    @contextmanager
    def both() -> Iterator[None]:
        with context(), _LinearThroughOnednn():
            yield

    return both


class _LinearThroughOnednn(TorchFunctionMode):
    """Uses oneDNN for `functional.linear` of float32 tensors on the CPU, and for nothing else."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        if func is functional.linear and not kwargs and _fits(args):
            return onednn_linear(*args)
        return func(*args, **(kwargs or {}))


def _fits(tensors: Sequence[Any]) -> bool:
    """Return whether oneDNN's operator accepts these tensors. It makes no checks itself."""
    weight, bias = tensors[1], tensors[2] if len(tensors) > 2 else None
    if weight.ndim != 2 or weight.shape[1] == 0:
        return False
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return False
    # The operator has no derivative, which a task pool that trains while it evaluates needs.
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return False
    return not torch.is_autocast_enabled("cpu") and all(
        tensor is None
        or (isinstance(tensor, Tensor) and tensor.dtype == torch.float32 and tensor.is_cpu)
        for tensor in tensors
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x weight' + bias`, computed by oneDNN.

    Args:
        x: `[..., n]`, contiguous: oneDNN is extremely slow on transposed views.
        weight: `[d, n]`, contiguous.
        bias: `[d]`, or None for zeros.

    Returns:
        `[..., d]`.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def multiplies_rows_by_onednn(tensor: Tensor) -> bool:
    """Return whether sums over rows of tensors like this use oneDNN in this context."""
    return _kernel.get() == ONEDNN and tensor.dtype == torch.float32 and tensor.is_cpu
