"""Models with one block's weights in memory, addressed by the merged model's names."""

import re
from collections.abc import Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.finite import is_sound
from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.experts.conversion import converted
from fusion_bench_featcal.experts.copies import copied_module
from fusion_bench_featcal.experts.pairing import pair_names
from fusion_bench_featcal.experts.source import ExpertSource, InMemoryExpert

_ALIGNMENT = 64  # bytes, the alignment of torch's CPU allocator
MOST_PINNED = 256 * 2**20
"""Bytes of the largest tensor that is copied to a GPU through pinned memory."""


class LazyModel:
    """A model (expert, base or merged) that reads its weights when they are needed.

    It is a runnable copy of the merged model's structure. Parameters are on the meta device until
    `loaded` reads them, in the merged model's dtype.

    Attributes:
        source: The model's weights, with tensors joined as in the merged model.
        structure: The merged model.
        keys: Name in the merged model's `state_dict` -> name in the source.
        bytes_read: Name in the source of each tensor read so far -> its bytes. A tensor that
            was read twice counts once.
    """

    advice = "Check its files"

    def __init__(
        self,
        label: str,
        source: ExpertSource,
        structure: nn.Module,
        *,
        device: torch.device | None = None,
        optional: Container[str] = (),
        module: nn.Module | None = None,
        owner: str = "the merged model",
    ) -> None:
        """Map the structure's names to the source's and check every shape. Reads no tensor.

        Args:
            label: Its name in messages, such as `experts['math']`.
            source: The weights.
            structure: The merged model, which defines structure and dtypes.
            device: Device of loaded tensors, by default the merged model's device.
            optional: Names of tensors that the source may lack or have in a different shape.
            module: The runnable copy, which models that are loaded one at a time can share.
            owner: Owner of the structure, in messages.

        Raises:
            CalibrationError: If a tensor is missing or has another shape, naming it.
        """
        stored = structure.state_dict(keep_vars=True)
        self.source = source = converted(source, structure)
        if isinstance(source, InMemoryExpert):
            self.advice = "Check the model"
        self.bytes_read: dict[str, int] = {}
        self._read_slots = dict[str, set[int]]()  # rows that were read of tensors not read whole
        self._ahead = dict[str, Future[Tensor]]()  # by name in the source
        self._label = label
        self.keys = pair_names(label, source, structure, optional, advice=self.advice, owner=owner)
        parameters = {id(parameter) for parameter in structure.parameters()}
        self._parameters = {name for name, t in stored.items() if id(t) in parameters}
        self._placements = {name: (t.dtype, device or t.device) for name, t in stored.items()}
        self._shapes = {name: tuple(t.shape) for name, t in stored.items()}
        self.structure, self._device, self._shared = structure, device, module

    @cached_property
    def module(self) -> nn.Module:
        """The runnable copy. It is made on first use, as many experts are only read."""
        return meta_copy(self.structure, self._device) if self._shared is None else self._shared

    def stored(self, name: str) -> Tensor:
        """Return one tensor under the merged model's name, in its stored dtype.

        Raises:
            CalibrationError: If it cannot be read, has NaN or (as a parameter) infinity, or has
                integers in place of real numbers.
        """
        key = self.keys[name]
        with error_context(self._label, remedy=self.advice):
            stored = self.source.tensor(key)
        if key not in self.bytes_read or key in self._read_slots:
            self.bytes_read[key] = self.source.nbytes(key)
            self._read_slots.pop(key, None)
        return self._checked(name, stored, self._shapes[name])

    def _checked(self, name: str, stored: Tensor, shape: tuple[int, ...]) -> Tensor:
        key = self.keys[name]
        if stored.shape != shape:
            raise CalibrationError(
                f"{self._label}: the source's tensor({key!r}) has shape {tuple(stored.shape)}, but "
                f"its shape({key!r}) is {shape}"
            )
        if self._placements[name][0].is_floating_point and not stored.is_floating_point():
            raise CalibrationError(
                f"{self._label}: tensor {name!r} is stored as {stored.dtype}, not as real numbers: "
                f"the model may be quantized. {self.advice}"
            )
        if not is_sound(stored, is_parameter=name in self._parameters):
            raise CalibrationError(
                f"{self._label}: tensor {name!r} has NaN or infinite values. {self.advice}"
            )
        return stored

    def dtype(self, name: str) -> torch.dtype:
        """Return the merged model's dtype of one tensor."""
        return self._placements[name][0]

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor on the CPU. Reads only these if the source supports it."""
        return self.source.rows(self.keys[name], start, stop).to("cpu")

    def tensor(self, name: str) -> Tensor:
        """Return one tensor under the merged model's name, in its dtype and on its device.

        Raises:
            CalibrationError: If it has NaN or (as a parameter) infinity.
        """
        ahead = self._ahead.pop(self.keys[name], None)
        return self._placed(name, self.stored(name) if ahead is None else ahead.result())

    def read_ahead(self, names: Iterable[str]) -> None:
        """Start to read tensors in another thread, if the source supports it.

        They are on the CPU until `tensor` or `loaded` uses them. Tensors of an earlier call that
        were not used are dropped.
        """
        if self.source.reads_in_threads:
            names, context = {self.keys[name]: name for name in names}, copy_context()
            reader = ThreadPoolExecutor(1)  # not shared: a forked process would have none
            self._ahead = {
                key: reader.submit(context.run, self.stored, name) for key, name in names.items()
            }
            reader.shutdown(wait=False)  # ends when everything is read

    def slot(self, name: str, number: int) -> Tensor:
        """Return the row of a mixture's tensor that belongs to one routed expert, as `tensor` does.

        Args:
            name: The merged model's name of a tensor with one row for each of them.
            number: The row. No other one is read, if the source supports it.

        Raises:
            CalibrationError: As `stored`.
        """
        key = self.keys[name]
        with error_context(self._label, remedy=self.advice):
            stored = self.source.rows(key, number, number + 1)
        count, *shape = self._shapes[name]
        if key not in self.bytes_read or key in self._read_slots:
            slots = self._read_slots.setdefault(key, set())
            slots.add(number)
            self.bytes_read[key] = self.source.nbytes(key) * len(slots) // count
        return self._placed(name, self._checked(name, stored, (1, *shape))[0])

    def _placed(self, name: str, stored: Tensor) -> Tensor:
        dtype, device = self._placements[name]
        tensor = copied_to(stored, device, dtype)
        # A tensor from a file may start at any byte, and matrix products round differently by
        # alignment. An expert must give the same result from a file and from memory.
        aligned = tensor.device.type != "cpu" or tensor.data_ptr() % _ALIGNMENT == 0
        return tensor if aligned else tensor.clone()

    @contextmanager
    def loaded(self, names: Iterable[str]) -> Iterator[nn.Module]:
        """Context with the named tensors in memory.

        Args:
            names: Names in the merged model's `state_dict`.

        Yields:
            The module. Its other parameters stay on the meta device.
        """
        replaced: list[tuple[str, Tensor]] = []
        read: dict[str, Tensor] = {}  # tied names share one stored tensor
        try:
            for name in names:
                if self.keys[name] not in read:
                    read[self.keys[name]] = self.tensor(name)
                replaced.append((name, set_module_tensor(self.module, name, read[self.keys[name]])))
            yield self.module
        finally:
            for name, empty in reversed(replaced):
                set_module_tensor(self.module, name, empty)


def copied_to(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return a tensor on a device and in a dtype, the same object if nothing changes.

    Copies to a GPU go through pinned memory and are queued, so that the host reads the next tensor
    while the GPU is busy. Torch never frees pinned memory, so the largest tensors do not use it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        if tensor.dtype.itemsize > dtype.itemsize:
            tensor = tensor.to(dtype)
        if tensor.nbytes <= MOST_PINNED:
            return tensor.pin_memory().to(device, non_blocking=True).to(dtype)
    return tensor.to(device=device, dtype=dtype)


def names_under(names: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Select the tensor names inside any of the modules."""
    prefixes = tuple(f"{module}." for module in modules)
    return [name for name in names if name.startswith(prefixes)]


def set_module_tensor(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Replace a model's parameter or buffer by a tensor, and return the old one."""
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = leaf in module._parameters
    slots: dict[str, Any] = module._parameters if is_parameter else module._buffers
    before = slots[leaf]
    if is_parameter and not isinstance(tensor, nn.Parameter):
        tensor = nn.Parameter(tensor, requires_grad=False)
    slots[leaf] = tensor
    return before


def lacks_values(error: Exception) -> bool:
    """Return whether an error is that of an operation on tensors of the meta device."""
    return re.search(r"\bmeta\b", str(error), re.IGNORECASE) is not None


def meta_copy(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """Return the model's structure with parameters and persistent buffers on the meta device.

    Buffers that no checkpoint stores (position ids, rotary frequencies) are copied, as part of the
    structure. No weight is copied even temporarily: deepcopy receives an empty replacement.

    Args:
        model: The model.
        device: Device of the copied buffers, by default their current device.
    """
    tensors = model.state_dict(keep_vars=True).values()
    hollow = copied_module(model, tensors, partial(torch.empty_like, device="meta")).eval()
    for module in hollow.modules() if device is not None else ():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)
    return hollow
