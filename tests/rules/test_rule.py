"""Rules of users, derived from the base class, and parts of the package's rules."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from tiny_models import normal
from tricky_models import few_outputs, stack_suite

from fusion_bench_featcal import Paper, calibrate
from fusion_bench_featcal.rules import GroupSums, Linear, Rule
from fusion_bench_featcal.rules.norms import NormMoments, NormSums
from fusion_bench_featcal.rules.targets import anchor_of


@dataclass(frozen=True)
class Wrapped(Rule):
    """The sums of Paper behind the defaults of the base class."""

    inner: Paper = field(default_factory=Paper)
    mix_alpha: float = 0.3
    calibrate_bias = True
    calibrate_norm = True

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        return self.inner.sums(group, merged, base)


def test_defaults_of_the_base_class_are_enough():
    suite = stack_suite(few_outputs)
    arguments = suite.merged, suite.base, suite.experts, suite.inputs
    more: dict[str, Any] = {"family": suite.family, "progress": False}
    model = calibrate(*arguments, Wrapped(), **more).model
    assert_identical(model, run_fast(suite, rule=Paper(), samples_per_task=8).model)
    with pytest.raises(
        TypeError,
        match=r"must be a Rule, such as .*, or settings, not <class",
    ):
        calibrate(*arguments, Paper, **more)  # type: ignore[arg-type]


def test_a_channel_of_a_norm_that_does_not_vary_gives_finite_values():
    gain, shift = normal(3, 2, 2).double()
    expert = Linear(gain, shift)
    sums, rows = NormSums(expert, 0.0, 1e-8), NormMoments(2, torch.zeros(1, dtype=torch.float64))
    rows.add(torch.ones(4, 2, dtype=torch.float64))
    sums.add("a", expert, rows)
    solved = sums.solve().linear
    assert torch.isfinite(solved.weight).all() and torch.isfinite(solved.bias).all()


@pytest.mark.parametrize("rho", [1.0, 2.0])
def test_the_anchor_lies_on_the_line_from_base_to_merged(rho: float):
    merged, base = (Linear(normal(n, 2, 3), normal(n, 2)) for n in (0, 1))
    expected = [rho * m + (1 - rho) * b for m, b in zip(merged, base, strict=True)]
    bound = 0 if rho == 1 else 1e-12
    anchor = anchor_of(Linear(*(part.clone() for part in merged)), base, rho)
    torch.testing.assert_close([*anchor], expected, rtol=bound, atol=bound)
