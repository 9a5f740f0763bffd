"""Custom rules, derived from the base class."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from calibrations import assert_identical
from tricky_models import few_outputs, stack_suite

from fusion_bench_featcal import Paper, calibrate
from fusion_bench_featcal.rules import GroupSums, Linear, Rule


@dataclass(frozen=True)
class Wrapped(Rule):
    """The paper's sums behind the defaults of the base class."""

    inner: Paper = field(default_factory=Paper)
    mix_alpha: float = 0.3
    calibrate_bias = True
    calibrate_norm = True

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        return self.inner.sums(group, merged, base)


def calibrated(rule: Any) -> Any:
    suite = stack_suite(few_outputs)
    models = suite.merged, suite.base, suite.experts, suite.inputs
    return calibrate(*models, rule, family=suite.family, progress=False).model


def test_defaults_hand_over_all_that_sums_may_need() -> None:
    assert_identical(calibrated(Wrapped()), calibrated(Paper()))


def test_a_class_in_place_of_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"settings or a rule, such as Paper\(\), not <class"):
        calibrated(Paper)
