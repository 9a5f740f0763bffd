"""Common part of rules that merge experts block by block."""

from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.setting_fields import Settings


class MergingRule(Rule, Settings):
    """Base of rules that sum over the inputs of each expert's modules.

    Attributes:
        features: Input features of an expert's block: the features of the `expert`, or the output
            of the preceding `merged` blocks.
    """

    features: str = "expert"
    estimates_statistics = False

    @property
    def runs_experts(self) -> bool:
        """Return False, because only inputs are summed."""
        return False

    @property
    def reads_base(self) -> bool:
        """Return False, because steps are relative to the experts' mean."""
        return False

    def start_scale(self, tasks: int) -> float:
        """Return the factor of the experts' mean step from the base in the initial model."""
        return 1.0
