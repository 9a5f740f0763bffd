"""Weights whose reader is overheard: what was read, and its digest."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fusion_bench_featcal.checkpoints.dependencies import differing_names
from fusion_bench_featcal.digests import digest_tensor
from fusion_bench_featcal.experts import SourceView
from fusion_bench_featcal.json_files import digest_json

Reads = Mapping[str, Mapping[str, str]]
"""Model -> name -> digest of the tensors that were read."""


class WatchedSource(SourceView):
    """An `ExpertSource` that knows the digest of every tensor that was read from it.

    A tensor is digested when it is read for the first time: it is in memory then anyway.
    """

    def __init__(self, source: Any) -> None:
        """Wrap a source."""
        super().__init__(source)
        self._digests: dict[str, str] = {}
        self._recent: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        """One tensor, as the source gives it."""
        tensor = self._source.tensor(name)
        if name not in self._digests:
            self._digests[name] = digest_tensor(tensor)
        self._recent.add(name)
        return tensor

    def take_recent(self) -> dict[str, str]:
        """Name -> digest of the tensors read since this was last asked."""
        recent = {name: self._digests[name] for name in sorted(self._recent)}
        self._recent.clear()
        return recent

    def digests(self) -> dict[str, str]:
        """Name -> digest of all tensors that were read."""
        return dict(sorted(self._digests.items()))

    def known(self, names: Iterable[str]) -> dict[str, str]:
        """Name -> digest of those of some tensors that exist; reads what it must."""
        there = [name for name in names if name in self.names()]
        for name in there:
            if name not in self._digests:
                self.tensor(name)
        return {name: self._digests[name] for name in there}


class WatchedSources:
    """Sources of several models, of which it is known what was read."""

    def __init__(self) -> None:
        """Start with none."""
        self._sources: dict[str, WatchedSource] = {}

    def watched(self, name: str, source: Any) -> WatchedSource:
        """A model's source, of which it is known what was read."""
        self._sources[name] = WatchedSource(source)
        return self._sources[name]

    def digests(self) -> dict[str, dict[str, str]]:
        """Model -> name -> digest of all tensors that were read."""
        return {name: source.digests() for name, source in self._sources.items()}


def take_recent(sources: Mapping[str, WatchedSource]) -> Reads:
    """Digests of the tensors that were read since this was last asked."""
    return {model: source.take_recent() for model, source in sources.items()}


def joined_reads(gathered: Iterable[Reads], models: Iterable[str]) -> Reads:
    """Join the reads of several processes into those of one that read everything, in order."""
    joined: dict[str, dict[str, str]] = {}
    for reads in gathered:
        for model, digests in reads.items():
            joined[model] = dict(sorted({**joined.get(model, {}), **digests}.items()))
    return {model: joined[model] for model in models if model in joined}


def as_hashes(reads: Reads, merged: str) -> dict[str, Any]:
    """The entry `hashes` of a manifest of reads, with the digest of the merged model."""
    models = {
        model: {"all": digest_json(digests), "tensors": digests} for model, digests in reads.items()
    }
    return {"models": models, "merged": merged}


def joined_hashes(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> Any:
    """Such entries of two calibrations of one merged model; None where nothing was hashed."""
    if first is None or second is None:
        return None
    sides = [{m: e["tensors"] for m, e in side["models"].items()} for side in (first, second)]
    return as_hashes(joined_reads(sides, first["models"]), first["merged"])


def changed_models(sources: Mapping[str, WatchedSource], reads: Reads) -> Iterable[str]:
    """One phrase for every model whose tensors are not those that were read before."""
    for model in filter(sources.__contains__, reads):
        names = differing_names(sources[model].known(reads[model]), reads[model])
        if names:
            yield f"weights of {model} (modelpool.models.{model}: {names})"
