"""Views of models whose own modules cannot be calibrated one by one."""

from typing import Any, Protocol

from torch import nn

from fusion_bench_featcal.families.base import Family


class ModelView(Protocol):
    """Another arrangement of the same weights, with identical maths."""

    def shown(self, model: nn.Module) -> nn.Module:
        """The model as calibration sees it; it may share tensors with the model."""
        ...

    def source(self, source: Any) -> Any:
        """An `ExpertSource` of an expert's weights as calibration sees them."""
        ...

    def restored(self, shown: nn.Module) -> nn.Module:
        """The model in its own arrangement again; what was shown is used up."""
        ...


class AsItIs:
    """The view of a model whose modules need no other arrangement."""

    def shown(self, model: nn.Module) -> nn.Module:
        """The model itself."""
        return model

    def source(self, source: Any) -> Any:
        """The source itself."""
        return source

    def restored(self, shown: nn.Module) -> nn.Module:
        """The model itself."""
        return shown


_AS_IT_IS = AsItIs()


def view_of(family: Family) -> ModelView:
    """The view that a family asks for by an attribute `view`; most ask for none."""
    return getattr(family, "view", _AS_IT_IS)
