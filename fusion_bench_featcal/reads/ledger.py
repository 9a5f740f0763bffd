"""Ledger of reads: bytes by model and place, and the sources that enter them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fusion_bench_featcal.experts.fetching import tell_expected
from fusion_bench_featcal.settings import CalibrationError


def stage_place(index: int) -> str:
    """The name of the place before a stage's blocks."""
    return f"stage {index}"


class ReadLedger:
    """Bytes by model and place, entered as they are read.

    A place is a block, or what comes before a stage's blocks (`stage 0`).

    Attributes:
        place: Where the run is now.
    """

    def __init__(self) -> None:
        """Start with nothing read, before the first stage."""
        self.place = ""
        self._read: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self._served: dict[str, int] = defaultdict(int)

    def enter_read(self, model: str, nbytes: int) -> None:
        """Enter bytes that were read from a model, at the present place."""
        self._read[model][self.place] += nbytes

    def enter_served(self, model: str, nbytes: int) -> None:
        """Enter bytes of the merged model that stood in for a model's."""
        self._served[model] += nbytes

    def read(self, model: str, place: str | None = None) -> int:
        """Bytes that were read from a model, at one place or at all."""
        places = self._read.get(model, {})
        return sum(places.values()) if place is None else places.get(place, 0)

    def served(self, model: str) -> int:
        """Bytes of the merged model that stood in for a model's."""
        return self._served.get(model, 0)

    def places(self, model: str) -> list[str]:
        """Places at which a model was read, in order."""
        return list(self._read.get(model, {}))


class LedgerSource:
    """An `ExpertSource` whose reads are entered into a ledger; some tensors may be stood in for."""

    def __init__(self, model: str, source: Any, ledger: ReadLedger) -> None:
        """Wrap a source.

        Args:
            model: The model's name in the pool.
            source: The `ExpertSource`.
            ledger: The ledger.
        """
        self._model = model
        self._source = source
        self._ledger = ledger
        self._instead: Mapping[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}

    def serve(self, instead: Mapping[str, Tensor]) -> None:
        """Give these tensors, by the source's names, in place of the model's own from now on."""
        self._instead = dict(instead)

    def hold(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor that was read, and give it again without another read."""
        self._held[name] = tensor

    def take(self, name: str, tensor: Tensor) -> None:
        """Hold a tensor that was read with the whole model, and enter it as read now."""
        self._enter_read(name, tensor)
        self.hold(name, tensor)

    def release(self, name: str | None = None) -> None:
        """Let go of a held tensor; None: of all."""
        if name is None:
            self._held.clear()
        else:
            self._held.pop(name, None)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._source.shape(name)

    def nbytes(self, name: str) -> int:
        """Bytes that reading a tensor takes: none where another stands in."""
        return 0 if name in self._instead else self._source.nbytes(name)

    def expect(self, names: Iterable[str]) -> None:
        """Pass on which tensors will be read next: none that is held or stood in for."""
        wanted = [name for name in names if name not in self._held and name not in self._instead]
        tell_expected(self._source, wanted)

    def tensor(self, name: str) -> Tensor:
        """One tensor, read and entered, or held, or what stands in for it."""
        if name in self._held:
            return self._held[name]
        tensor = self._instead.get(name)
        if tensor is not None:
            self._ledger.enter_served(self._model, _size(tensor))
            return tensor
        tensor = self._source.tensor(name)
        self._enter_read(name, tensor)
        return tensor

    def _enter_read(self, name: str, tensor: Tensor) -> None:
        try:
            size = self.nbytes(name)
        except (AttributeError, CalibrationError):  # this source, or one it wraps, does not tell
            size = _size(tensor)
        self._ledger.enter_read(self._model, size)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
