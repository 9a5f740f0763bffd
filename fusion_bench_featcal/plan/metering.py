"""FLOPs and memory of tensor operations, counted on the meta device."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_COUNTS = {str(operator): count for operator, count in flop_registry.items()}


class Meter(TorchDispatchMode):
    """Counts FLOPs by step, and the most bytes of new tensors that were alive at once.

    Attributes:
        step: Name of the step that is counted.
        flops: FLOPs by step.
        peak: The bytes.
    """

    def __init__(self, step: str) -> None:
        """Start with nothing counted."""
        super().__init__()
        self.step, self.peak = step, 0
        self.flops: Counter[str] = Counter()
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self._most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Models look at token ids for padding, of which a plan has none: no id is found.
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        result = func(*args, **kwargs)
        count = _COUNTS.get(str(func._overloadpacket).removesuffix("_"))  # in place or not
        if count is not None:
            self.flops[self.step] += count(*args, **kwargs, out_val=result)
        given = {_storage(tensor) for tensor in _tensors((args, kwargs))}
        for tensor in _tensors(result):
            if _storage(tensor) not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: Any) -> None:
        self._alive.append((StorageWeakRef(storage), storage.nbytes()))
        self._most += storage.nbytes()
        if self._most > self.peak:  # or less: some may be gone
            self._alive = [entry for entry in self._alive if not entry[0].expired()]
            self._most = sum(size for _, size in self._alive)
            self.peak = max(self.peak, self._most)


class _FusedAttention(TorchFunctionMode):
    """Attention that keeps no scores; on the meta device torch would form them."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        query, key, value = (*args, *kwargs.values())[:3]
        width = query.shape[-1] + value.shape[-1]
        self._meter.flops[self._meter.step] += 2 * query[..., 0].numel() * key.shape[-2] * width
        return query.new_empty(*query.shape[:-1], value.shape[-1])


@contextmanager
def metered(step: str) -> Iterator[Meter]:
    """Context on the meta device, without autocast, which models cannot switch off there."""
    meter = Meter(step)
    with (
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
        torch.no_grad(),
        torch.device("meta"),
        _FusedAttention(meter),
        meter,
    ):
        yield meter


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
