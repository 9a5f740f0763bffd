"""What a stretch of a model's forward pass computes, counted from shapes on the meta device."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Element by element, but with a function that takes longer than its memory.
_COSTLY = ("gelu", "sigmoid", "silu", "tanh", "exp", "softmax", "erf", "log", "cos", "sin", "mish")


@dataclass
class Counts:
    """What was computed.

    Attributes:
        products: Matrix products `[n, k] [k, m]`, so many at once: `(at once, n, k, m)`.
        attention: Fused attentions: `(heads x batch, queries, keys, width)`.
        moved: Bytes that all else read and wrote.
        costly: Bytes of these where a function such as exp was taken of every entry.
        calls: Number of operations.
        peak: Largest number of bytes that were alive at once.
    """

    products: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    attention: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)
    moved: int = 0
    costly: int = 0
    calls: int = 0
    peak: int = 0

    @property
    def flops(self) -> int:
        """Floating point operations of all products and attentions."""
        products = sum(2 * c * b * n * k * m for (b, n, k, m), c in self.products.items())
        return products + sum(4 * c * b * q * k * d for (b, q, k, d), c in self.attention.items())


def counted(compute: Callable[[], Any]) -> tuple[Any, Counts]:
    """Run something on tensors of the meta device.

    Args:
        compute: What to run.

    Returns:
        Its result and what it computed.
    """
    counts = Counts()
    with torch.no_grad(), _without_autocast(), _Attention(counts), _Operations(counts):
        return compute(), counts


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Context for models that switch autocast off: there is none to ask for on the meta device."""
    own = torch.autocast
    try:
        torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment,misc]
        yield
    finally:
        torch.autocast = own  # type: ignore[misc]


class _Attention(TorchFunctionMode):
    """Notes fused attentions, which the meta device would take apart."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = (*args, *(kwargs or {}).values())[:3]
        heads = query.shape[:-2].numel()
        self._counts.attention[heads, query.shape[-2], key.shape[-2], value.shape[-1]] += 1
        return query.new_empty(*query.shape[:-1], value.shape[-1])


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, made = _tensors((args, kwargs)), _tensors(result)
        known = {_storage(tensor) for tensor in taken}
        is_view = bool(made) and not func._schema.is_mutable
        is_view = is_view and all(_storage(tensor) in known for tensor in made)
        self._counts.calls += 1
        if not is_view:
            self._note(func, taken, made)
            self._watch([tensor for tensor in made if _storage(tensor) not in known])
        return result

    def _note(self, func: Any, taken: list[Tensor], made: list[Tensor]) -> None:
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        product = _product(name, taken)
        if product is not None:
            self._counts.products[product] += 1
            return
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*taken, *made))
        self._counts.moved += moved
        if any(word in name for word in _COSTLY):
            self._counts.costly += moved

    def _watch(self, made: Iterable[Tensor]) -> None:
        for tensor in made:
            storage = tensor.untyped_storage()
            self._alive[_storage(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: (ref, n) for k, (ref, n) in self._alive.items() if not ref.expired()}
        alive = sum(size for _, size in self._alive.values())
        self._counts.peak = max(self._counts.peak, alive)


def _product(name: str, taken: list[Tensor]) -> tuple[int, int, int, int] | None:
    """A matrix product's sizes."""
    if name in ("mm", "addmm"):
        left, right = taken[-2:]
        return 1, left.shape[0], left.shape[1], right.shape[1]
    if name in ("bmm", "baddbmm"):
        left, right = taken[-2:]
        return left.shape[0], left.shape[1], left.shape[2], right.shape[2]
    if name.startswith("convolution"):
        image, kernel = taken[:2]
        patches = image.shape[0] * (image.shape[2:].numel() // kernel.shape[2:].numel())
        return 1, patches, kernel[0].numel(), kernel.shape[0]
    return None


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def size_of(tree: Any, seen: set[int] | None = None) -> int:
    """Bytes of all distinct tensors in a nested value, dataclasses included.

    Args:
        tree: The value.
        seen: Storages that were counted before; those of the value are added.

    Returns:
        The bytes of those that are new.
    """
    seen = set() if seen is None else seen
    total = 0
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            total += 0 if storage._cdata in seen else storage.nbytes()
            seen.add(storage._cdata)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif hasattr(value, "__dataclass_fields__"):
            waiting += vars(value).values()
    return total
