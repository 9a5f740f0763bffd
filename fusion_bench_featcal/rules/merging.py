"""Common part of rules that merge experts block by block."""

from fusion_bench_featcal.rules.rule import Rule
from fusion_bench_featcal.setting_fields import Settings


class MergingRule(Rule, Settings):
    """Base of rules whose sums are over the inputs of each expert's modules.

    Attributes:
        features: Features that an expert's block receives: the `expert`'s, or those of the `merged`
            blocks before it.
        outside: Whether layers outside the blocks are solved, too.
    """

    features: str = "expert"
    outside: bool = False

    @property
    def runs_experts(self) -> bool:
        """Return False: sums are over inputs alone."""
        return False

    @property
    def reads_base(self) -> bool:
        """Return False: steps are from the experts' mean."""
        return False

    def start_scale(self, tasks: int) -> float:
        """Return the factor of the experts' mean step from the base in the model to start from."""
        return 1.0
