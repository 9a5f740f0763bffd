"""The protocol of opened models in `featcal calibrate`, and what all implementations share."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.folders.tasks import Task
from fusion_bench_featcal.run.result import CalibrationResult
from fusion_bench_featcal.settings import FeatCalSettings


class Opened(Protocol):
    """The models of one request, opened and compared with each other.

    Weights are what the implementation takes for the merged model's calibrated part: a source of
    tensors, or the model itself.

    Attributes:
        request: The request.
    """

    request: Request

    @property
    def title(self) -> str:
        """Kind and class of the models."""
        ...

    @property
    def size(self) -> int:
        """Bytes of the model."""
        ...

    @property
    def read(self) -> int:
        """Bytes of all experts."""
        ...

    @property
    def notes(self) -> list[str]:
        """Sentences on the models."""
        ...

    @property
    def experts(self) -> Collection[str]:
        """The experts' tasks."""
        ...

    @property
    def has_heads(self) -> bool:
        """True if every expert has a head of its own."""
        ...

    @property
    def own_head(self) -> str:
        """The model whose head the saved one has, if experts have heads."""
        ...

    @property
    def settings(self) -> FeatCalSettings:
        """Settings of the calibration, all of them set."""
        ...

    @property
    def doubts(self) -> Sequence[str]:
        """Reasons why experts may not read the data as they did when they were tuned."""
        ...

    @property
    def merged_weights(self) -> Any:
        """The merged model's weights."""
        ...

    def open_tasks(self) -> dict[str, Task]:
        """Open every task's data."""
        ...

    def load(self, weights: Any) -> Any:
        """Return the merged model with other weights, on the device."""
        ...

    def load_expert(self, task: str) -> Any:
        """Return an expert on the device."""
        ...

    def head_of(self, expert: Any) -> Any:
        """Return an expert without the weights that `with_head` replaces, which are freed."""
        ...

    def with_head(self, task: str, model: Any, head: Any) -> Any:
        """Return a model with an expert's head, if experts have heads of their own."""
        ...

    def calibrate(self, tasks: Mapping[str, Task]) -> tuple[CalibrationResult, Any, list[str]]:
        """Calibrate the merged model. Returns the result, the calibrated weights, and notes."""
        ...

    def write(self, weights: Any, heads: Mapping[str, Any], folder: Path) -> None:
        """Write a model and all that belongs to it to an empty folder, without a card."""
        ...

    def card_head(self, folder: Path) -> tuple[Mapping[str, str], Sequence[str]]:
        """Return keys of a card's head that name the library, and tags, of a written folder."""
        ...


def notes_on_inputs(request: Request, adapters: Collection[str]) -> list[str]:
    """Return a line for the merger, the base and each expert of a request.

    Args:
        request: The request.
        adapters: Tasks whose experts are adapters.
    """
    notes = [f"merge: {request.merge}"] if request.merge else []
    notes += [f"base: {request.base}"] if request.base else []
    return notes + [
        f"expert {task}: {location}{' (adapter)' * (task in adapters)}"
        for task, location in request.expert.items()
    ]


def require_base(request: Request, *, is_needed: bool) -> None:
    """Refuse a request without a base that its rule or its merger needs."""
    if request.base is None and (request.merged is None or is_needed):
        instead = "" if request.merged is None else ", or give --set anchor_rho=1"
        raise ValueError(
            f"--base is missing: name the model that the experts were tuned from{instead}"
        )
