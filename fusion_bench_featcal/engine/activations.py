"""Features on their way from one block to the next: on the device, in host memory or files.

A batch puts what its next block will receive away and fetches it when its turn comes. What comes
back is what was put away, bit for bit and in the same layout, so the place has no part in the
result.
"""

import logging
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion_bench_featcal.engine.memory import free_bytes
from fusion_bench_featcal.engine.places import KEPT, DiskPlace, HostPlace, Kept, Place
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)

UNLIMITED = float("inf")


class Store:
    """Puts values away in a place and fetches them.

    Tensors are found in tensors, dicts, lists, tuples and dataclasses, however nested; what hides
    in other objects stays where it is. A tensor that was fetched and comes back unchanged (masks,
    rotary angles, a position bias) is not stored again, and one that is met twice is stored once.
    """

    def __init__(self, place: Place) -> None:
        """Store in a place."""
        self.place = place
        # Tensors that are stored: by identity, with the version that was.
        self._known: dict[int, tuple[weakref.ref[Tensor], int, weakref.ref[Kept]]] = {}
        self._at_hand: tuple[Any, dict[str, Any]] = (None, {})

    def close(self) -> None:
        """Let everything go."""
        self._known.clear()
        self._at_hand = (None, {})
        self.place.close()

    def put(self, value: Any) -> Any:
        """The value with its tensors put away.

        Raises:
            CalibrationError: If a file cannot be written, naming the setting.
        """
        return _mapped(value, Tensor, self._keep)

    def fetch(self, value: Any) -> Any:
        """Return what was put away, on its device again."""
        fetched: dict[int, Tensor] = {}  # one that is met twice stays one

        def tensor(kept: Kept) -> Tensor:
            if id(kept) not in fetched:
                fetched[id(kept)] = kept.tensor()
                self._remember(fetched[id(kept)], kept)
            return fetched[id(kept)]

        return _mapped(value, KEPT, tensor)

    def prefetch(self, value: Any) -> None:
        """Begin to fetch what will be asked for soon."""
        _mapped(value, KEPT, lambda kept: kept.start())

    def at_hand(self, owner: Any) -> dict[str, Any]:
        """Values that an owner put away or fetched, until another one's turn: it may ask again."""
        if self._at_hand[0] is not owner:
            self._at_hand = (owner, {})
        return self._at_hand[1]

    def _keep(self, tensor: Tensor) -> Any:
        if type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.numel():
            return tensor
        if id(tensor) in self._known:
            reference, version, kept = self._known[id(tensor)]
            stored = kept()
            if stored is not None and reference() is tensor and version == _version(tensor):
                return stored
        stored = self.place.keep(tensor)
        self._remember(tensor, stored)
        return stored

    def _remember(self, tensor: Tensor, kept: Kept) -> None:
        key, known = id(tensor), self._known
        reference = weakref.ref(tensor, lambda gone: _forget(known, key, gone))
        known[key] = (reference, _version(tensor), weakref.ref(kept))


class WaitingBatch(Batch):
    """A batch whose features wait in a store between blocks.

    To set one of `cal`, `exp`, `exp_hidden`, `merged` and the `marks` is to put it away, to read it
    to fetch it, and to begin fetching the following batch's.
    """

    def __init__(self, store: Store, *args: Any) -> None:
        """Make a batch.

        Args:
            store: The store.
            *args: As `Batch` takes them.
        """
        self.store = store
        self.following: WaitingBatch | None = None
        self._slots: dict[str, Any] = {}
        super().__init__(*args)

    def _fetch(self, slot: str) -> Any:
        at_hand = self.store.at_hand(self)
        if at_hand.get(slot) is None:
            at_hand[slot] = self.store.fetch(self._slots.get(slot))
        if self.following is not None:
            self.store.prefetch(self.following._slots.get(slot))
        return at_hand[slot]

    def _put(self, slot: str, value: Any) -> None:
        self.store.at_hand(self)[slot] = value
        # What was there goes afterwards: masks that come back are stored in it.
        self._slots[slot] = self.store.put(value)

    cal = property(lambda self: self._fetch("cal"), lambda self, value: self._put("cal", value))
    exp = property(lambda self: self._fetch("exp"), lambda self, value: self._put("exp", value))
    exp_hidden = property(
        lambda self: self._fetch("exp_hidden"), lambda self, value: self._put("exp_hidden", value)
    )
    merged = property(
        lambda self: self._fetch("merged"), lambda self, value: self._put("merged", value)
    )
    marks = property(lambda self: _WaitingMarks(self), lambda self, value: self.marks.update(value))


class _WaitingMarks(MutableMapping[str, Any]):
    """The marks of a waiting batch, each of which waits by itself."""

    def __init__(self, batch: WaitingBatch) -> None:
        self._batch = batch

    def __getitem__(self, name: str) -> Any:
        if f"mark {name}" not in self._batch._slots:
            raise KeyError(name)
        return self._batch._fetch(f"mark {name}")

    def __setitem__(self, name: str, value: Any) -> None:
        self._batch._put(f"mark {name}", value)

    def __delitem__(self, name: str) -> None:
        del self._batch._slots[f"mark {name}"]
        self._batch.store.at_hand(self._batch).pop(f"mark {name}", None)

    def __contains__(self, name: object) -> bool:
        return f"mark {name}" in self._batch._slots  # nothing is fetched for it

    def __iter__(self) -> Iterator[str]:
        slots = [slot for slot in self._batch._slots if slot.startswith("mark ")]
        return (slot.removeprefix("mark ") for slot in slots)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Activations:
    """Chooses where a batch's features wait; a context that leaves no file behind."""

    def __init__(self, *rooms: tuple[Store | None, float], further: int = 1) -> None:
        """Prepare.

        Args:
            *rooms: Stores with the bytes that each takes, in order of preference; the last takes
                all that no other does. None in place of a store: features stay where they are.
            further: Number of features of the size of an expert's that will wait besides.
        """
        self._further = further
        self._rooms = [store for store, _ in rooms]
        self._left = [float(size) for _, size in rooms]
        self._used: set[int] = {0}
        self._last: WaitingBatch | None = None

    def __enter__(self) -> "Activations":
        if self._rooms[0] is not None:
            self._rooms[0].place.open()
        return self

    def __exit__(self, *error: object) -> None:
        self._last = None
        for store in filter(None, self._rooms):
            store.close()

    def batch(self, inputs: Any, samples: int, index: int, cal: Any, exp: Any) -> Batch:
        """A batch that waits in the first place with room.

        Args:
            inputs: The model's inputs, or None.
            samples: Number of samples.
            index: The batch's number in its task.
            cal: Input of the calibrated model's next block.
            exp: Input of the expert's next block.
        """
        batch = Batch(inputs, samples, index, cal=cal, exp=exp)
        return batch if self._rooms[0] is None and len(self._rooms) == 1 else self._placed(batch)

    def settled(self, batch: Batch) -> Batch:
        """The batch, booked with its present size; or one that waits elsewhere if it has outgrown.

        What a batch carries may grow, as by the position bias of T5's first block.
        """
        if len(self._rooms) == 1 or isinstance(batch, WaitingBatch):
            return batch
        self.release(batch)
        return self._placed(batch)

    def release(self, batch: Batch) -> None:
        """Give back the room of a batch whose features are gone."""
        number, size = batch.booked
        self._left[number] += size
        batch.booked = (0, 0)

    def _placed(self, batch: Batch) -> Batch:
        """Book a place for a batch, and put its features there."""
        waiting = batch.cal, batch.exp, batch.exp_hidden, batch.merged
        size = tensor_bytes((waiting, dict(batch.marks)))
        if batch.exp_hidden is None:  # what will wait besides is of the size of what goes in
            size += self._further * tensor_bytes(getattr(batch.exp, "hidden", None))
        number = next((n for n, left in enumerate(self._left) if size <= left), -1)
        number %= len(self._rooms)
        store = self._rooms[number]
        placed = batch
        if store is not None:
            placed = WaitingBatch(store, batch.inputs, batch.samples, batch.index)
            placed.cal, placed.exp, placed.exp_hidden, placed.merged = waiting
            placed.marks = batch.marks
            placed.valid, placed.other = batch.valid, batch.other
            placed.start, placed.folds = batch.start, batch.folds
            placed.sensitivity = batch.sensitivity
            placed.held, placed.compared = batch.held, batch.compared
            placed.copies = batch.copies
            if self._last is not None and self._last.store is store:
                self._last.following = placed
            self._last = placed
            if number not in self._used:
                log.info("activations wait in %s too: there is no more room", store.place.name)
        self._used.add(number)
        self._left[number] -= size
        placed.booked = number, size
        return placed


def tensor_bytes(value: Any) -> int:
    """Bytes of the tensors in a nested value, each counted once."""
    sizes: dict[int, int] = {}
    parts = [value]
    while parts:
        part = parts.pop()
        if isinstance(part, Tensor):
            sizes[id(part)] = part.nbytes
        elif isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, dict):
            parts += part.values()
        elif is_dataclass(part):
            parts += [getattr(part, field.name) for field in fields(part)]
    return sum(sizes.values())


def open_activations(
    settings: FeatCalSettings,
    device: torch.device,
    reserve: Callable[[], float] = lambda: 0,
    processes: int = 1,
    further: int = 1,
) -> Activations:
    """The places that `method.activations` names.

    Args:
        settings: `activations` and `activations_dir` are used.
        device: Where blocks run.
        reserve: Bytes that a block's visit needs beside the samples' features; asked for under
            `auto` only.
        processes: How many may share the host's memory.
        further: As `Activations` takes it.

    Returns:
        The places, as a context; to enter it makes the folder for files, if they come first.
    """
    choice, folder = settings.activations, settings.activations_dir
    if choice == "device" or (choice == "host" and device.type == "cpu"):
        return Activations((None, UNLIMITED))
    if choice == "host":
        return Activations((Store(HostPlace(device)), UNLIMITED))
    files = Store(DiskPlace(folder)), UNLIMITED
    if choice == "disk":
        return Activations(files)
    memory = free_bytes(torch.device("cpu"))
    host = UNLIMITED if memory is None else memory / processes
    if device.type == "cpu":
        return Activations((None, host - reserve()), files, further=further)
    own = free_bytes(device)
    own = UNLIMITED if own is None else own - reserve()
    rooms = (None, own), (Store(HostPlace(device)), host * HOST_SHARE), files
    return Activations(*rooms, further=further)


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
