"""Weights of a base without the heads and poolers that its experts have."""

from torch import Tensor

from fusion_bench_featcal.experts import ExpertSource, SourceView


class Completed(SourceView):
    """A model's weights, and another's where it has none of a name.

    A masked language model has no pooler, which the classifiers tuned from it have, and another
    head. Both names may have the prefix of the body, which a bare model's lack.
    """

    def __init__(self, source: ExpertSource, other: ExpertSource) -> None:
        """Refer to both.

        Args:
            source: The weights.
            other: The weights that complete them.
        """
        super().__init__(source)
        self._other = other
        bare = {name.partition(".")[2]: name for name in other.names()}
        own = source.names()
        shared = {bare.get(name, name) for name in own} & other.names()
        known = own if len(own & other.names()) >= len(shared) else shared
        self._own = {name: name if name in own else name.partition(".")[2] for name in known}
        self._added = other.names() - set(self._own)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._own) | self._added

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._other.shape(name) if name in self._added else super().shape(self._own[name])

    def nbytes(self, name: str) -> int:
        """Bytes that reading one tensor takes."""
        if name in self._added:
            return self._other.nbytes(name)  # type: ignore[attr-defined]
        return super().nbytes(self._own[name])

    def tensor(self, name: str) -> Tensor:
        """One tensor."""
        return self._other.tensor(name) if name in self._added else super().tensor(self._own[name])
