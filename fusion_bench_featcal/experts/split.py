"""Weights of open_clip's models with their fused attention split into q, k and v."""

import re
from collections.abc import Iterable

from torch import Tensor

from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.families.open_clip import PROJECTIONS

_FUSED = re.compile(r"(.+\.attn)\.in_proj_(weight|bias)")


class SplitSource(SourceView):
    """A model's weights with each fused matrix also as three slices. Nothing is copied."""

    def __init__(self, source: ExpertSource) -> None:
        """Wrap a source of a model in open_clip's form."""
        super().__init__(source)
        self._slices: dict[str, tuple[str, int]] = {}
        for name in source.names():
            if fuses := _FUSED.fullmatch(name):
                for index, projection in enumerate(PROJECTIONS):
                    self._slices[f"{fuses[1]}.{projection}.{fuses[2]}"] = name, index

    def names(self) -> set[str]:
        """Return names of all tensors and all slices."""
        return super().names() | set(self._slices)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor or slice."""
        if name not in self._slices:
            return super().shape(name)
        first, *rest = super().shape(self._slices[name][0])
        return (first // 3, *rest)

    def nbytes(self, name: str) -> int:
        """Return the size of one tensor or slice."""
        if name not in self._slices:
            return super().nbytes(name)
        return super().nbytes(self._slices[name][0]) // 3

    def tensor(self, name: str) -> Tensor:
        """Return one tensor or slice."""
        if name not in self._slices:
            return super().tensor(name)
        whole, index = self._slices[name]
        return super().tensor(whole).chunk(3)[index]

    def will_need(self, names: Iterable[str]) -> None:
        """Let the source start reading the tensors of some names ahead."""
        super().will_need({self._slices.get(name, (name, 0))[0] for name in names})
