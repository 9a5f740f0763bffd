"""Views of sources that count what is read, and that read no more than a budget allows."""

from collections.abc import Mapping

from torch import Tensor

from fusion_bench_featcal.digests import digest_tensor
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.settings import CalibrationError


class Counted(SourceView):
    """A source of which every tensor that is read is noted. Reading it again adds nothing.

    Attributes:
        source: The source.
        sizes: Bytes of the tensors that were read, by name.
        digests: Their digests; empty where these are not wanted.
    """

    def __init__(self, source: ExpertSource, *, hashed: bool = False) -> None:
        """Wrap a source.

        Args:
            source: The source.
            hashed: Whether to digest tensors when they are first read.
        """
        super().__init__(source)
        self.source = source
        self.sizes: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        self._hashed = hashed

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        tensor = self._source.tensor(name)
        if name not in self.sizes:
            try:
                self.sizes[name] = self.nbytes(name)
            except CalibrationError:  # the source does not tell
                self.sizes[name] = tensor.nbytes
            if self._hashed:
                self.digests[name] = digest_tensor(tensor)
        return tensor


class Budgeted(SourceView):
    """A source of which tensors beyond a budget are not read: the merged model's stand in."""

    def __init__(self, source: ExpertSource, stand_ins: Mapping[str, Tensor]) -> None:
        """Wrap a source.

        Args:
            source: The source.
            stand_ins: Tensors in place of those that are not read, by the source's names.
        """
        super().__init__(source)
        self._stand_ins = stand_ins

    def nbytes(self, name: str) -> int:
        """Return the bytes that reading one tensor takes: none where another stands in."""
        return 0 if name in self._stand_ins else super().nbytes(name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, or the one that stands in for it."""
        return self._stand_ins[name] if name in self._stand_ins else self._source.tensor(name)
