"""Reads of a calibration: the sources that count them, in which order they come, and where."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from fusion_bench_featcal.experts.expert_model import ExpertModel
from fusion_bench_featcal.experts.source import SourceView
from fusion_bench_featcal.settings import CalibrationError

BASE = "_pretrained_"
"""Name of the base model, as FusionBench's pools have it."""


def stage_place(index: int) -> str:
    """The name of the place before a stage's blocks."""
    return f"stage {index}"


class CountedSource(SourceView):
    """An `ExpertSource` whose reads are counted; other tensors may stand in for some of its own.

    Attributes:
        stand_ins: Tensors given in place of the source's own, by its names.
        held: Tensors that were read already and are given again without another read.
        stood_in: Bytes of the stand-ins that were given.
    """

    def __init__(self, source: Any, count: Callable[[int], None]) -> None:
        """Wrap a source.

        Args:
            source: The `ExpertSource`.
            count: Called with the bytes of every read.
        """
        super().__init__(source)
        self._count = count
        self.stand_ins: Mapping[str, Tensor] = {}
        self.held: dict[str, Tensor] = {}
        self.stood_in = 0

    def nbytes(self, name: str) -> int:
        """Bytes that reading a tensor takes: none where another stands in."""
        return 0 if name in self.stand_ins else super().nbytes(name)

    def expect(self, names: Iterable[str]) -> None:
        """Pass on which tensors will be read next."""
        at_hand = {*self.held, *self.stand_ins}
        super().expect([name for name in names if name not in at_hand])

    def tensor(self, name: str) -> Tensor:
        """One tensor, read and counted, or held, or its stand-in."""
        if name in self.held:
            return self.held[name]
        if name in self.stand_ins:
            self.stood_in += self.stand_ins[name].nbytes
            return self.stand_ins[name]
        tensor = self._source.tensor(name)
        self.count(name, tensor)
        return tensor

    def count(self, name: str, tensor: Tensor) -> None:
        """Count a tensor as read now."""
        try:
            size = super().nbytes(name)
        except CalibrationError:  # the source does not tell
            size = tensor.nbytes
        self._count(size)


class Reads:
    """Bytes read by model and place, and the order in which visits to places read.

    A place is a block, or what comes before a stage's blocks (`stage 0`).

    Attributes:
        sources: The sources of base and experts, by model.
        visits: Names of the tensors that every expert's visit to a place reads, in order of the
            places.
        base: The base model; None where nothing is read of it.
        base_visits: Names of the tensors that are read of it at a place.
        experts: The experts, in the order of their visits.
        on_enter: Called with every place before its first visit.
    """

    def __init__(self) -> None:
        """Start with nothing read, before the first stage."""
        self.sources: dict[str, CountedSource] = {}
        self.visits: Mapping[str, list[str]] = {}
        self.base: ExpertModel | None = None
        self.base_visits: dict[str, list[str]] = {}
        self.experts: Mapping[str, ExpertModel] = {}
        self.on_enter: Callable[[str], None] | None = None
        self._place = ""
        self._bytes: dict[str, Counter[str]] = defaultdict(Counter)

    def counted(self, model: str, source: Any) -> CountedSource:
        """A model's source, whose reads are counted from now on."""

        def count(nbytes: int) -> None:
            self._bytes[model][self._place] += nbytes

        self.sources[model] = CountedSource(source, count)
        return self.sources[model]

    def enter(self, place: str) -> None:
        """Come to a place."""
        self._place = place
        if self.on_enter is not None:
            self.on_enter(place)

    def read(self, model: str, place: str | None = None) -> int:
        """Bytes that were read of a model, at one place or at all."""
        places = self._bytes.get(model, Counter())
        return sum(places.values()) if place is None else places.get(place, 0)

    def total(self, model: str, gathered: Iterable[Mapping[str, int]]) -> None:
        """Count as a model's bytes by place what all processes have read."""
        self._bytes[model] = sum(map(Counter, gathered), Counter())

    def places(self, model: str) -> list[str]:
        """Places at which a model was read, in order."""
        return list(self._bytes.get(model, {}))

    def expect_after(self, place: str, task: str) -> None:
        """Tell sources what is read after a task's visit, so that disks work meanwhile.

        The next task's visit to the same place follows, or the first one's to the next place, which
        begins with what is read of the base.
        """
        tasks, places = list(self.experts), list(self.visits)
        following = tasks[tasks.index(task) + 1 :]
        if not following:
            later = places[places.index(place) + 1 :]
            if not later:
                return
            place, following = later[0], tasks
            if self.base is not None:
                self.base.expect(self.base_visits.get(place, ()))
        self.experts[following[0]].expect(self.visits[place])
