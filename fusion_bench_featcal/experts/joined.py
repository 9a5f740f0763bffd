"""Mixture-of-experts weights joined into one tensor, the layout of transformers 5."""

import re

import torch
from torch import Tensor

from fusion_bench_featcal.experts.source import ExpertSource, SourceView, rows_of

_MODULES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_MATRIX = re.compile(
    r"(.*)\.(?:mlp|block_sparse_moe)\.(?:experts\.(\d+)\.(\w+)|gate)\.weight", re.ASCII
)
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class JoinedExperts(SourceView):
    """Weights of a checkpoint with one matrix per expert, as one tensor for all experts."""

    def __init__(self, source: ExpertSource) -> None:
        """Wrap a source."""
        super().__init__(source)
        matrices: dict[tuple[str, str, int], str] = {}
        self._stored: dict[str, list[list[str]]] = {}  # names of the parts of each expert
        self._renamed: dict[str, str] = {}
        for name in source.names():
            if (match := _MATRIX.fullmatch(name)) is None:
                continue
            stem, number, module = match.groups()
            if number is None:
                self._renamed[f"{stem}.mlp.gate.weight"] = name
            else:
                matrices[stem, _MIXTRAL.get(module, module), int(number)] = name
        for stem in {stem for stem, _, _ in matrices}:
            count = 1 + max(number for owner, _, number in matrices if owner == stem)
            for leaf, modules in _MODULES.items():
                names = [[matrices.get((stem, m, n), "") for m in modules] for n in range(count)]
                if all(map(all, names)):
                    self._stored[f"{stem}.mlp.experts.{leaf}"] = names

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        rows_stored = {name for rows in self._stored.values() for row in rows for name in row}
        hidden = rows_stored | set(self._renamed.values())
        return (self._source.names() - hidden) | self._stored.keys() | self._renamed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor: `[experts, rows, columns]` if it is joined."""
        if name not in self._stored:
            return self._source.shape(self._renamed.get(name, name))
        experts = self._stored[name]
        rows, columns = self._source.shape(experts[0][0])
        return len(experts), rows * len(experts[0]), columns

    def origins(self, name: str) -> list[tuple[ExpertSource, str]]:
        """Return the source and the names of the matrices of one tensor."""
        rows = self._stored.get(name, [[self._renamed.get(name, name)]])
        return [(self._source, part) for row in rows for part in row]

    def tensor(self, name: str) -> Tensor:
        """Read one tensor."""
        if name not in self._stored:
            return self._source.tensor(self._renamed.get(name, name))
        return self._joined(self._stored[name])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read some rows of one tensor, which are experts if it is joined."""
        if name not in self._stored:
            return rows_of(self._source, self._renamed.get(name, name), start, stop)
        return self._joined(self._stored[name][start:stop])

    def _joined(self, experts: list[list[str]]) -> Tensor:
        read = self._source.tensor
        return torch.stack([torch.cat([read(name) for name in names]) for names in experts])
