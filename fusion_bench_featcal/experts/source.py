"""Sources of weights: the interface, a model in memory, and the base of views of other sources."""

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from xxhash import xxh3_128

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.experts.joined import Joined
from fusion_bench_featcal.files.tensors import update_digest


class ExpertSource:
    """A readable set of named tensors: one model's weights. Base of all sources.

    A source defines `names`, `shape` and `tensor`. The other members have defaults.

    Attributes:
        config: The model's transformers config or the content of its config.json, which is
            compared with the merged model, or None.
        joined: Name of a tensor that is several in files -> how these are joined.
        reads_in_threads: Whether several threads may read tensors at the same time.
    """

    config: Any = None
    reads_in_threads = False
    joined: Mapping[str, Joined] = MappingProxyType({})

    @cached_property
    def pairings(self) -> dict[object, Mapping[str, str | None]]:
        """Structure -> its names of tensors with their names here, as `pair_names` found them."""
        return {}

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        raise NotImplementedError

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it if possible."""
        raise NotImplementedError

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype. The caller must not write to it."""
        raise NotImplementedError

    def nbytes(self, name: str) -> int:
        """Return the bytes to read for one tensor. The default reads it."""
        return self.tensor(name).nbytes

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor, by default of the whole tensor. A scalar has no rows."""
        tensor = self.tensor(name)
        return tensor[start:stop] if tensor.ndim else tensor

    @property
    def digest(self) -> str:
        """Digest of names, shapes, dtypes and content of all tensors, which are read."""
        digest = xxh3_128()
        for name in sorted(self.names()):
            update_digest(digest, self.tensor(name), name)
        return digest.hexdigest()


class InMemoryExpert(ExpertSource):
    """Weights of a module in memory. Nothing is copied."""

    def __init__(self, module: nn.Module) -> None:
        """Refer to a module's parameters and persistent buffers.

        Args:
            module: The expert. It is neither moved nor changed.
        """
        self.config = getattr(module, "config", None)
        self._tensors = module.state_dict()

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def nbytes(self, name: str) -> int:
        """Return the size of one tensor in memory."""
        return self._tensors[name].nbytes

    def tensor(self, name: str) -> Tensor:
        """Return one tensor of the module itself."""
        return self._tensors[name]


class SourceView(ExpertSource):
    """Base of sources that wrap another one and change some of its weights."""

    def __init__(self, source: ExpertSource) -> None:
        """Wrap a source."""
        self._source, self.joined = source, source.joined

    @property
    def config(self) -> Any:  # type: ignore[override]
        """Config of the source."""
        return self._source.config

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._source.shape(name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes to read for one tensor."""
        return self._source.nbytes(name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor of the view."""
        return self._source.tensor(name)


class LazyTensorDict(Mapping[str, Tensor]):
    """A mapping that reads a tensor at every look-up."""

    def __init__(self, read: Callable[[str], Tensor], names: Mapping[str, str]) -> None:
        """Refer to the tensors.

        Args:
            read: Returns a tensor.
            names: Name -> name to read.
        """
        self.read, self.names = read, names

    def __getitem__(self, name: str) -> Tensor:
        return self.read(self.names[name])

    def __contains__(self, name: object) -> bool:
        return name in self.names  # the default of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def source_of(model: nn.Module | ExpertSource) -> ExpertSource:
    """Return a model's weights as a source. A source is returned unchanged.

    Raises:
        CalibrationError: If it is neither, or has an adapter.
    """
    refuse_unusable(model)
    if isinstance(model, nn.Module):
        return InMemoryExpert(model)
    if not isinstance(model, ExpertSource):
        raise CalibrationError(
            f"a {type(model).__name__} is not a model: give a module, or an instance of your own "
            "class derived from ExpertSource"
        )
    return model


def refuse_unusable(model: object) -> None:
    """Refuse a model of PEFT, which renames the tensors of its base, or a model without weights.

    Raises:
        CalibrationError: If the model has an adapter or is on the meta device.
    """
    if callable(getattr(model, "merge_and_unload", None)):
        raise CalibrationError(
            f"a {type(model).__name__} has an adapter: give model.merge_and_unload()"
        )
    if isinstance(model, nn.Module) and any(p.is_meta for p in model.parameters()):
        raise CalibrationError(
            f"a {type(model).__name__} is on the meta device, without weights: load them"
        )


def total_bytes(source: ExpertSource) -> int:
    """Return the bytes of a full read of a source."""
    return sum(map(source.nbytes, source.names()))
