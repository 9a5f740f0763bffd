"""Features on their way from one block to the next: on the device, in host memory or files.

A batch puts what its next block will receive away and fetches it when its turn comes. What comes
back is what was put away, bit for bit and in the same layout, so the place has no part in the
result.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.engine.memory import free_bytes
from fusion_bench_featcal.engine.places import KEPT, DiskPlace, HostPlace, Kept, OnDevice, Place
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)

UNLIMITED = float("inf")


class Activations:
    """Puts tensors away and fetches them; a context that leaves no file behind.

    Tensors are found in tensors, dicts, lists, tuples and dataclasses, however nested; what hides
    in other objects stays where it is. A tensor that was fetched and comes back unchanged (masks,
    rotary angles, a position bias) is not stored again, and one that is met twice is stored once.

    Attributes:
        peak: Largest number of bytes that waited in each place so far.
    """

    def __init__(self, places: Sequence[Place] = (), budgets: Sequence[float] = ()) -> None:
        """Prepare.

        Args:
            places: Where tensors wait, in order of preference; none: they stay as they are.
            budgets: How many bytes each place takes; the last one takes what no other does.
        """
        self._places = list(places)
        self._budgets = list(budgets) or [UNLIMITED] * len(self._places)
        self._held = [0] * len(self._places)
        self.peak: dict[str, int] = {}
        # Tensors that are stored: by identity, with the version that was.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Kept]]] = {}
        self._hot: tuple[Any, dict[str, Any]] = (None, {})

    @property
    def in_place(self) -> bool:
        """Return whether everything stays where it is."""
        return not self._places

    def __enter__(self) -> "Activations":
        for place in self._places[:1]:
            place.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._known.clear()
        self._hot = (None, {})
        for place in self._places:
            place.close()

    def put(self, value: Any) -> Any:
        """The value with its tensors put away.

        Raises:
            CalibrationError: If a file cannot be written, naming the setting.
        """
        return value if self.in_place else _mapped(value, Tensor, self._keep)

    def fetch(self, value: Any) -> Any:
        """Return what was put away, on its device again."""
        if self.in_place:
            return value
        found: dict[int, Tensor] = {}  # one that is met twice stays one

        def tensor(kept: Kept) -> Tensor:
            if id(kept) not in found:
                found[id(kept)] = self._tensor(kept)
            return found[id(kept)]

        return _mapped(value, KEPT, tensor)

    def prefetch(self, value: Any) -> None:
        """Begin to fetch what will be asked for soon."""
        if not self.in_place:
            _mapped(value, KEPT, lambda kept: kept.start())

    def keep_hot(self, owner: Any, slot: str, value: Any) -> None:
        """Hold what an owner put away or fetched until another's turn: it may ask again."""
        if self.in_place:
            return
        if self._hot[0] is not owner:
            self._hot = (owner, {})
        self._hot[1][slot] = value

    def hot(self, owner: Any, slot: str) -> Any:
        """The value that the owner last put away or fetched, if it is still there; else None."""
        if self.in_place:
            return None
        if self._hot[0] is not owner:
            self._hot = (owner, {})
        return self._hot[1].get(slot)

    def _keep(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        kept = self._stored(tensor)
        if kept is not None:
            return kept
        index = self._choose(tensor.nbytes)
        kept = self._places[index].keep(tensor)
        self._account(index, kept.nbytes)
        weakref.finalize(kept, self._account, index, -kept.nbytes)
        self._remember(tensor, kept)
        return kept

    def _stored(self, tensor: Tensor) -> Kept | None:
        """Place where the tensor, as it is, waits already."""
        if id(tensor) not in self._known:
            return None
        known, version, kept = self._known[id(tensor)]
        return kept() if known() is tensor and version == _version(tensor) else None

    def _tensor(self, kept: Kept) -> Tensor:
        tensor = kept.tensor()
        self._remember(tensor, kept)
        return tensor

    def _remember(self, tensor: Tensor, kept: Kept) -> None:
        key, known = id(tensor), self._known
        reference = weakref.ref(tensor, lambda gone: _forget(known, key, gone))
        known[key] = (reference, _version(tensor), weakref.ref(kept))

    def _choose(self, size: int) -> int:
        """The first place with room, else the last."""
        for index, (held, budget) in enumerate(zip(self._held, self._budgets, strict=True)):
            if held + size <= budget:
                return index
        return len(self._places) - 1

    def _account(self, index: int, size: int) -> None:
        name = self._places[index].name
        if size > 0 and index > 0 and name not in self.peak:
            log.info("activations wait in %s too: %s is full", name, self._places[index - 1].name)
        self._held[index] += size
        self.peak[name] = max(self.peak.get(name, 0), self._held[index])


STAY = Activations()
"""Everything stays where it is."""


def open_activations(
    settings: FeatCalSettings,
    device: torch.device,
    reserve: Callable[[], float] = lambda: 0,
    processes: int = 1,
) -> Activations:
    """The places that `method.activations` names.

    Args:
        settings: `activations` and `activations_dir` are used.
        device: Where blocks run.
        reserve: Bytes that a block's visit needs beside the samples' features; asked for under
            `auto` only.
        processes: How many may share the host's memory.

    Returns:
        The places, as a context; to enter it makes the folder for files, if they come first.
    """
    choice, folder = settings.activations, settings.activations_dir
    if choice == "device" or (choice == "host" and device.type == "cpu"):
        return Activations()
    if choice == "host":
        return Activations([HostPlace(device)])
    if choice == "disk":
        return Activations([DiskPlace(folder)])
    memory = free_bytes(torch.device("cpu"))
    own = reserve() if device.type == "cpu" else 0
    host = UNLIMITED if memory is None else memory / processes - own
    if device.type == "cpu":
        return Activations([OnDevice("memory"), DiskPlace(folder)], [host, UNLIMITED])
    own = free_bytes(device)
    own = UNLIMITED if own is None else own - reserve()
    places = [OnDevice("device"), HostPlace(device), DiskPlace(folder)]
    return Activations(places, [own, host * HOST_SHARE, UNLIMITED])


HOST_SHARE = 0.7
"""Share of free host memory that `auto` fills beside a GPU: pinned pages cannot be given back."""


def _mapped(value: Any, kind: type | tuple[type, ...], change: Callable[[Any], Any]) -> Any:
    """A nested value with everything of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {key: _mapped(part, kind, change) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(part, kind, change) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        new = {name: _mapped(part, kind, change) for name, part in parts.items()}
        return replace(value, **new)
    return value


def _forget(known: dict[int, Any], key: int, gone: Any) -> None:
    if key in known and known[key][0] is gone:
        del known[key]


def _version(tensor: Tensor) -> int:
    """Raised by every in-place write."""
    return 0 if tensor.is_inference() else tensor._version
