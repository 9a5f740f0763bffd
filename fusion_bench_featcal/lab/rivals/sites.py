"""Features that methods correct, one class for each kind of model (`Pooling` for embeddings)."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.data.embeddings import Pooling
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.lab.rivals.features import final_rows, final_states, project
from fusion_bench_featcal.streams.batch import rows_of


@dataclass(frozen=True)
class ProjectedFeature:
    """The feature of a CLIP vision model after CLIP's visual projection."""

    projection: nn.Linear

    def features(self, model: nn.Module, inputs: Any) -> Tensor:
        """Return projected features of images, `[batch, d]`, not normalised."""
        pixels = inputs["pixel_values"].to(next(model.parameters()).dtype)
        return project(model(pixels), self.projection)


@dataclass(frozen=True)
class FinalState:
    """The output of a language model's last norm, named `norm`."""

    norm: str

    def features(self, model: nn.Module, inputs: object) -> Tensor:
        """Return the states that predict a target in a pass on the targets, `[n, d]`."""
        rows = final_rows(model, resolve_family("auto", model), inputs)
        return rows_of(final_states(model, self.norm, inputs), rows)


CorrectedFeature = ProjectedFeature | FinalState | Pooling
