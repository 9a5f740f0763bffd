"""Modules that correct a feature, as parts of a `CorrectedModel`."""

from torch import Tensor, nn
from torch.nn import functional


class SurgeryModule(nn.Module):
    """The correction `f - U relu(D f)`: D is `down`, `[rank, d]`, U is `up`, `[d, rank]`."""

    def __init__(self, down: Tensor, up: Tensor) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(down), nn.Parameter(up)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        hidden = functional.relu(functional.linear(features, self.down))
        return features - functional.linear(hidden, self.up)


class AffineModule(nn.Module):
    """The correction `f - (A f + b)`: A is `matrix`, `[d, d]`, b is `shift`, `[d]`."""

    def __init__(self, matrix: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.matrix, self.shift = nn.Parameter(matrix), nn.Parameter(shift)

    def forward(self, features: Tensor) -> Tensor:
        """Correct features `[..., d]`."""
        return features - functional.linear(features, self.matrix, self.shift)
