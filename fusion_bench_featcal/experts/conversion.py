"""Files whose tensors transformers joins on loading, read as the tensors of the model."""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain

import torch
from torch import Tensor, nn

from fusion_bench_featcal.errors.place import error_context, message_of
from fusion_bench_featcal.experts.joined import Joined, find_joined
from fusion_bench_featcal.experts.source import ExpertSource, SourceView


class ConvertedSource(SourceView):
    """A source by the names of a model, with one tensor in place of those that are its parts."""

    def __init__(self, source: ExpertSource, joined: Mapping[str, Joined]) -> None:
        """Wrap a source.

        Args:
            source: The tensors as in files, all or some of them.
            joined: The tensors that are several in files.
        """
        super().__init__(source)
        self.joined, self._shape = joined, cache(self._shape_of_joined)
        self.reads_in_threads = source.reads_in_threads

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        available = super().names()
        whole = {name for name, one in self.joined.items() if available.issuperset(one.names)}
        return available.difference(*(one.names for one in self.joined.values())) | whole

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor.

        Raises:
            CalibrationError: If its parts do not fit each other.
        """
        return self._shape(name) if name in self.joined else super().shape(name)

    def _shape_of_joined(self, name: str) -> tuple[int, ...]:
        def empty(part: str) -> Tensor:
            return torch.empty(self._source.shape(part), device="meta")

        with error_context(f"tensor {name!r}", cause=message_of(RuntimeError)):
            return tuple(self.joined[name].rows(empty).shape)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes to read for one tensor."""
        return sum(map(self._source.nbytes, self.stored_names([name])))

    def tensor(self, name: str) -> Tensor:
        """Return one tensor."""
        if name not in self.joined:
            return super().tensor(name)
        return self.joined[name].rows(self._source.tensor)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor, and read only their parts."""
        if name not in self.joined:
            return self._source.rows(name, start, stop)
        return self.joined[name].rows(self._source.tensor, slice(start, stop))

    def stored_names(self, names: Iterable[str]) -> list[str]:
        """Return the names in files of some tensors."""
        stored = (self.joined[name].names if name in self.joined else [name] for name in names)
        return [*chain.from_iterable(stored)]

    def split(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of the view as they are in files."""
        parts = dict[str, Tensor]()
        for name, tensor in tensors.items():
            parts |= self.joined[name].split(tensor) if name in self.joined else {name: tensor}
        return parts

    @property
    def digest(self) -> str:
        """Digest of the files."""
        return self._source.digest


def converted(source: ExpertSource, model: nn.Module) -> ExpertSource:
    """Return a source by a model's names, itself if no tensor of the model is several in it."""
    unknown = source.names() - model.state_dict().keys()
    joined = find_joined(unknown, model) if unknown and hasattr(model, "config") else {}
    return ConvertedSource(source, joined) if joined else source
