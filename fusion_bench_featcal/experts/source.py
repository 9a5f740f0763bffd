"""Sources of weights: a model in memory, and views of other sources."""

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from fusion_bench_featcal.settings import CalibrationError


class ExpertSource(Protocol):
    """A readable set of named tensors: one model's weights.

    A source may have a method `expect(names)` besides: it is told which tensors will be read next.
    `nbytes(name)`, how many bytes reading a tensor takes, is needed for read budgets only. An
    attribute `config`, the model's transformers config or the content of its config.json, is
    compared with the merged model's.
    """

    def names(self) -> set[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it where that is possible."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is stored. It must not be written to."""
        ...


class InMemoryExpert:
    """Weights of a module that is in memory anyway; nothing is copied."""

    def __init__(self, module: nn.Module) -> None:
        """Refer to a module's parameters and persistent buffers.

        Args:
            module: The expert; it is neither moved nor changed.
        """
        self.config = getattr(module, "config", None)
        self._tensors = module.state_dict()

    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return tuple(self._tensors[name].shape)

    def nbytes(self, name: str) -> int:
        """Size of one tensor in memory."""
        return self._tensors[name].numel() * self._tensors[name].element_size()

    def tensor(self, name: str) -> Tensor:
        """One tensor of the module itself."""
        return self._tensors[name]


def source_of(model: nn.Module | ExpertSource) -> ExpertSource:
    """A model's weights as a source: a module's own, or the source itself."""
    return InMemoryExpert(model) if isinstance(model, nn.Module) else model


def known_bytes(source: ExpertSource, name: str) -> int:
    """Bytes that reading a tensor takes.

    Raises:
        CalibrationError: If the source does not tell.
    """
    try:
        return int(source.nbytes(name))  # type: ignore[attr-defined]
    except AttributeError as error:  # of this source, or of one that it wraps
        raise CalibrationError(
            f"{error}: it would tell how many bytes a tensor takes, by which "
            "method.expert_read_budget plans what to read; add it, or set that to null"
        ) from error


class SourceView:
    """Base of sources that show another one's weights, some of them changed."""

    def __init__(self, source: ExpertSource) -> None:
        """Refer to a source."""
        self._source = source

    @property
    def config(self) -> Any:
        """The source's config, if it has one."""
        return getattr(self._source, "config", None)

    def names(self) -> set[str]:
        """Names of all tensors."""
        return self._source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor."""
        return self._source.shape(name)

    def nbytes(self, name: str) -> int:
        """Bytes that reading one tensor takes.

        Raises:
            CalibrationError: If the source does not tell.
        """
        return known_bytes(self._source, name)

    def tensor(self, name: str) -> Tensor:
        """One tensor, as it is seen."""
        return self._source.tensor(name)

    def expect(self, names: Iterable[str]) -> None:
        """Tell the source which tensors will be read next."""
        tell_expected(self._source, names)


def tell_expected(source: Any, names: Iterable[str]) -> None:
    """Tell a source which of its tensors will be read next, where it has a method `expect`."""
    expect = getattr(source, "expect", None)
    if expect is not None:
        expect(names)
