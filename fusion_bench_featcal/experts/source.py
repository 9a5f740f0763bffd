"""Sources of weights: the interface, a model in memory, and the base of views of other sources."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError


class ExpertSource(Protocol):
    """A readable set of named tensors: one model's weights.

    Optional members: `nbytes(name)`, the bytes to read for a tensor, which a read budget needs,
    `rows(name, start, stop)`, which reads only these rows, `will_need(names)`, which starts reading
    tensors ahead and returns at once, and `config`, the model's transformers config or the content
    of its config.json, which is compared with the merged model.
    """

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor, without reading it if possible."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype. The caller must not write to it."""
        ...


class InMemoryExpert:
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


class SourceView:
    """Base of sources that wrap another one and change some of its weights."""

    def __init__(self, source: ExpertSource) -> None:
        """Wrap a source."""
        self._source = source

    @property
    def config(self) -> Any:
        """The source's config, if it has one."""
        return getattr(self._source, "config", None)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of one tensor."""
        return self._source.shape(name)

    def nbytes(self, name: str) -> int:
        """Return the number of bytes to read for one tensor."""
        return known_bytes(self._source, name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor of the view."""
        return self._source.tensor(name)

    def will_need(self, names: Iterable[str]) -> None:
        """Let the source start reading tensors ahead."""
        read_ahead(self._source, names)


class Tensors(Mapping[str, Tensor]):
    """Tensors that are read at every look-up."""

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
        CalibrationError: If it is neither.
    """
    if isinstance(model, nn.Module):
        return InMemoryExpert(model)
    if not all(hasattr(model, name) for name in ("names", "shape", "tensor")):
        raise CalibrationError(
            f"a {type(model).__name__} is no model: give a module, or a source of weights with "
            "names, shape and tensor"
        )
    return model


def known_bytes(source: Any, name: str) -> int:
    """Return the bytes to read for a tensor.

    Raises:
        CalibrationError: If the source has no sizes, as one written by a user may.
    """
    if not hasattr(source, "nbytes"):
        raise CalibrationError(
            f"{type(source).__name__} has no nbytes(name). method.expert_read_budget needs the "
            "size of each tensor: add this method to the source, or set "
            "method.expert_read_budget to null"
        )
    return int(source.nbytes(name))


def read_ahead(source: Any, names: Iterable[str]) -> None:
    """Let a source start reading tensors that are needed soon, if it supports that."""
    if hasattr(source, "will_need"):
        source.will_need(names)


def rows_of(source: Any, name: str, start: int, stop: int) -> Tensor:
    """Return some rows of a source's tensor on the CPU. Reads only these if possible."""
    read = getattr(source, "rows", None)
    return (source.tensor(name)[start:stop] if read is None else read(name, start, stop)).to("cpu")
