"""Rules of users, derived from the base class, and parts of the package's rules."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from calibrations import assert_identical, run_fast
from oracle import Knobs
from torch import nn
from tricky_models import block_of, few_outputs, stack_suite

from fusion_bench_featcal import Paper, calibrate
from fusion_bench_featcal.rules import GroupSums, Linear, Rule


@dataclass(frozen=True)
class Wrapped(Rule):
    """The sums of Paper behind the defaults of the base class."""

    inner: Paper = field(default_factory=Paper)
    mix_alpha: float = 0.3
    calibrate_bias = True
    calibrate_norm = True

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        return self.inner.sums(group, merged, base)


@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_defaults_of_the_base_class_are_enough(rho: float):
    """The base that it is given does not count at rho 1."""
    suite = replace(stack_suite(few_outputs), base=stack_suite(few_outputs, seed=1).base)
    paper = Paper(anchor_rho=rho)
    arguments = suite.merged, suite.base, suite.experts, suite.inputs
    more: dict[str, Any] = {"family": suite.family, "progress": False}
    model = calibrate(*arguments, Wrapped(paper), **more).model
    assert_identical(model, run_fast(suite, rule=paper, samples_per_task=8).model)
    with pytest.raises(
        TypeError,
        match=r"must be a Rule, such as .*, or settings, not <class",
    ):
        calibrate(*arguments, Paper, **more)  # type: ignore[arg-type]


def test_a_channel_of_a_norm_that_does_not_vary_gives_finite_values():
    """Without a pull its two equations are one."""
    normed = block_of(lambda b, x: x + b.norm(x), norm=partial(nn.LayerNorm, 4))
    model = run_fast(stack_suite(normed, tasks=1, sizes=(1,)), Knobs(lam=0.0)).model
    assert all(parameter.isfinite().all() for parameter in model.parameters())
