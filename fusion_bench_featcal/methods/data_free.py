"""Post-merging methods of others that need no data: they rescale the merged step from the base."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import torch
from fusion_bench.method.singular_value_calibration.utils import (
    subspace_consistency_spectral_calibration_accelerated as calibrated_spectrum,
)
from torch import Tensor, nn

from fusion_bench_featcal.experts import ExpertModel, names_under, source_of
from fusion_bench_featcal.families import check_family, resolve_family
from fusion_bench_featcal.fusionbench.options import checked_settings
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL
from fusion_bench_featcal.methods.interface import MethodInputs, WithoutData
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.setting_checks import POSITIVE, SHARE, Check, is_number, problems_of
from fusion_bench_featcal.settings import FeatCalSettings

_ANY: Check = ("a finite number", is_number)


class _DataFree(WithoutData):
    """A method whose settings are annotated attributes and `family`."""

    name: ClassVar[str]
    older_names: ClassVar = ()
    checks: ClassVar[dict[str, Check]]
    _config_mapping: ClassVar[dict[str, str]]

    def __init_subclass__(cls) -> None:
        cls._config_mapping = {name: name for name in (*cls.checks, "family")}

    def __init__(self, **keys: Any) -> None:
        """Check the settings, by the names of the attributes.

        Raises:
            ValueError: If one is unknown or out of range.
        """
        refuse_unknown_settings(keys, self._config_mapping, owner=self.name)
        family = {"family": keys.pop("family")} if "family" in keys else {}
        self._settings: FeatCalSettings = checked_settings(family)
        check_family(self._settings.family)
        for name, value in keys.items():
            setattr(self, name, value)
        if problems := problems_of(self, self.checks):
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, defaults included."""
        own = {name: getattr(self, name) for name in self.checks}
        return own | {"family": self._settings.family}

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a pool without a base by a CalibrationError."""
        inputs.require_base(f"{self.name} needs")

    def _base(self, merged: nn.Module, inputs: MethodInputs) -> ExpertModel:
        base = inputs.base(self._settings)
        assert base is not None  # checked before
        return ExpertModel(BASE_MODEL, source_of(base), merged, role="base model")


class SingularValues(_DataFree):
    """SVC (arXiv 2602.05536): singular values of the merged step, by how often tasks count in them.

    With `u_r` a left singular vector of the merged step and `a_i = u_r' (W_i - W_0)`, the share
    `s_i = <a, a_i> / |a_i|^2` is above 1 where the merged step counts a task's direction more than
    once. The singular value is multiplied by `T / sum_i max(alpha, s_i)`. FusionBench solves it; it
    has `alpha` 0.1 for most mergers, 1 for TSV-M and WUDI, and like ours changes every matrix.

    Attributes:
        alpha: Least share, > 0: a singular value is raised `1 / alpha` times at most.
    """

    name = "svc"
    alpha: float = 0.1
    checks: ClassVar = {"alpha": POSITIVE}

    @torch.no_grad()
    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Change the merged model in place, with one matrix of every expert in memory."""
        base = self._base(merged, inputs)
        sources = inputs.experts(self._settings)
        experts = [ExpertModel(n, source_of(s), merged) for n, s in sources.items()]
        for name, parameter in merged.named_parameters():
            if parameter.ndim == 2:
                parameter.data.copy_(
                    calibrated_spectrum(
                        base_weight=base.tensor(name),
                        task_weights=[expert.tensor(name) for expert in experts],
                        merged_weight=parameter.data,
                        alpha=self.alpha,
                        accelerator=parameter.device,
                    )
                )
        return merged


@dataclass(frozen=True)
class LayerFacts:
    """Two facts that LARV weighs a layer by, means over its matrices.

    Attributes:
        richness: Effective rank of the base over that of the step.
        conflict: How far base and step are from commuting.
    """

    richness: float
    conflict: float


class Larv(_DataFree):
    """LARV (arXiv 2602.09413), after its abstract and reports of others: layers' steps rescaled.

    A block's merged step is multiplied by a gate around 1, which rises with the effective rank of
    the base relative to that of the step (e) and with depth, and falls with the conflict c:
    `1 + strength tanh(gain (score - 1))` with the score `e depth^rise / (1 + softplus(z(c)))`, z
    standardised over blocks. Open, and our choice: a layer is a block, its facts are means over its
    matrices, scores are divided by their mean over blocks (else all gates are at their upper end),
    the step is the merged one (its authors scale the experts' before merging, which is the same for
    mergers that keep the factor of a matrix), and parameters outside the blocks stay.

    Attributes:
        strength: Largest change of a factor, 0 to 1.
        gain: Steepness of the gate, > 0.
        rise: Exponent of the depth.
    """

    name = "larv"
    strength: float = 0.5
    gain: float = 3.0
    rise: float = 0.5
    checks: ClassVar = {
        "strength": SHARE,
        "gain": POSITIVE,
        "rise": _ANY,
    }

    @torch.no_grad()
    def post_merge(self, merged: nn.Module, inputs: MethodInputs) -> nn.Module:
        """Change the merged model in place."""
        base = self._base(merged, inputs)
        family = resolve_family(self._settings.family, merged)
        blocks = [block for stage in family.stages(merged) for block in stage]
        parameters = dict(merged.named_parameters())
        starts = {
            block: {name: base.tensor(name) for name in names_under(parameters, [block])}
            for block in blocks
        }
        found = {block: list(_matrix_facts(merged, starts[block])) for block in blocks}
        # A block none of whose matrices has changed has nothing to scale.
        facts = {block: _mean_facts(matrices) for block, matrices in found.items() if matrices}
        for block, factor in self.gates(facts).items():
            for name, start in starts[block].items():
                parameter = merged.get_parameter(name).data
                parameter.copy_(start + factor * (parameter - start))
        return merged

    def gates(self, facts: Mapping[str, LayerFacts]) -> dict[str, float]:
        """Factor of each block's step, in forward order."""
        if not facts:
            return {}
        conflicts = torch.tensor([fact.conflict for fact in facts.values()], dtype=torch.float64)
        spread = float(conflicts.std(correction=0)) or 1.0
        scores = {}
        for number, (block, fact) in enumerate(facts.items(), start=1):
            z = (fact.conflict - float(conflicts.mean())) / spread
            depth = (number / len(facts)) ** self.rise
            scores[block] = fact.richness * depth / (1 + math.log1p(math.exp(z)))
        mean = sum(scores.values()) / len(scores)
        return {
            block: 1 + self.strength * math.tanh(self.gain * (score / mean - 1))
            for block, score in scores.items()
        }


def _mean_facts(matrices: Sequence[tuple[float, float]]) -> LayerFacts:
    return LayerFacts(*(statistics.fmean(values) for values in zip(*matrices, strict=True)))


def _matrix_facts(merged: nn.Module, starts: Mapping[str, Tensor]) -> Iterator[tuple[float, float]]:
    """Richness and conflict of each matrix that has changed."""
    for name, start in starts.items():
        base, step = start.double(), merged.get_parameter(name).data.double() - start.double()
        if base.ndim != 2 or not bool(step.any()):
            continue
        outer, inner = base @ step.T, base.T @ step
        apart = (outer - outer.T).norm() + (inner - inner.T).norm()
        conflict = apart / (2 * base.norm() * step.norm())
        yield effective_rank(base) / effective_rank(step), float(conflict)


def effective_rank(matrix: Tensor) -> float:
    """Exponential of the entropy of the squared singular values' shares, 1 to the rank."""
    energies = torch.linalg.svdvals(matrix).square()
    shares = energies / energies.sum()
    return float(torch.special.entr(shares).sum().exp())
