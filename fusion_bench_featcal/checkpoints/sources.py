"""Weights whose reader is overheard: what was read, and its digest."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from fusion_bench_featcal.checkpoints.fingerprint import digest_tensor
from fusion_bench_featcal.experts import SourceView


class WatchedSource(SourceView):
    """An `ExpertSource` that knows the digest of every tensor that was read from it.

    A tensor is digested when it is read for the first time: it is in memory then anyway.
    """

    def __init__(self, source: Any) -> None:
        """Wrap a source.

        Args:
            source: The `ExpertSource`.
        """
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

    def differing(self, digests: Mapping[str, str]) -> list[str]:
        """Names whose tensors have other digests, or do not exist; reads what it must."""
        return [name for name in digests if self._digest(name) != digests[name]]

    def _digest(self, name: str) -> str | None:
        if name not in self._digests and name in self.names():
            self.tensor(name)
        return self._digests.get(name)


def take_recent(sources: Mapping[str, WatchedSource]) -> dict[str, dict[str, str]]:
    """Model -> name -> digest of what was read since this was last asked."""
    return {model: source.take_recent() for model, source in sources.items()}


def joined_reads(
    gathered: Iterable[Mapping[str, Mapping[str, str]]], models: Iterable[str]
) -> dict[str, dict[str, str]]:
    """Join the reads of several processes into those of one that read everything.

    Args:
        gathered: The result of `take_recent` in each process.
        models: All models in order.
    """
    joined: dict[str, dict[str, str]] = {}
    for reads in gathered:
        for model, digests in reads.items():
            joined[model] = dict(sorted({**joined.get(model, {}), **digests}.items()))
    return {model: joined[model] for model in models if model in joined}


def changed_models(
    sources: Mapping[str, WatchedSource], reads: Mapping[str, Mapping[str, str]]
) -> Iterable[str]:
    """One phrase for every model whose tensors are not those that were read before."""
    for model, digests in reads.items():
        names = sources[model].differing(digests)
        if names:
            yield (
                f"weights of {model} (modelpool.models.{model}: {len(names)} of {len(digests)} "
                f"tensors, the first is {names[0]})"
            )
