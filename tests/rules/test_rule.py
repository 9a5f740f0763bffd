"""Rules of users, derived from the base class."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Overheard, assert_identical, run_fast
from tiny_models import clip_suite, normal
from torch import Tensor
from tricky_models import few_outputs, stack_suite

from fusion_bench_featcal import CalibrationError, Paper, calibrate
from fusion_bench_featcal.rules import GroupSums, Linear, Rule, Solved
from fusion_bench_featcal.rules.norms import NormRows, NormSums
from fusion_bench_featcal.run import checkpoint, own_code, versions_of_software


@dataclass(frozen=True)
class Wrapped(Rule):
    """The sums of Paper behind the defaults of the base class."""

    inner: Paper = field(default_factory=Paper)
    mix_alpha: float = 0.3
    calibrate_bias = True
    calibrate_norm = True

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        return self.inner.sums(group, merged, base)


@dataclass(frozen=True)
class OneRow(Wrapped):
    """Solves only the first row of each weight."""

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        sums: Any = super().sums(group, merged, base)
        solve = sums.solve
        sums.solve = lambda: Solved(Linear(solve().linear.weight[:1], merged.bias))
        return sums


@dataclass(frozen=True)
class Twice(Wrapped):
    """Solves its first group in two turns."""

    def turns(self, groups: Any) -> Any:
        return [groups, groups[:1]]


@dataclass(frozen=True)
class Flat(Wrapped):
    """Returns groups in place of turns."""

    def turns(self, groups: Any) -> Any:
        return groups


class Cut(Overheard):
    """A source whose matrices lack their last row."""

    def tensor(self, name: str) -> Tensor:
        whole = super().tensor(name)
        return whole[:-1] if whole.ndim == 2 else whole


def test_defaults_of_the_base_class_are_enough():
    suite = stack_suite(few_outputs)
    arguments = suite.merged, suite.base, suite.experts, suite.inputs
    more: dict[str, Any] = {"family": suite.family, "progress": False}
    model = calibrate(*arguments, Wrapped(), **more).model
    assert_identical(model, run_fast(suite, rule=Paper(), samples_per_task=8).model)
    with pytest.raises(TypeError, match=r"settings or a rule, such as Paper\(\), not <class"):
        calibrate(*arguments, Paper, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (OneRow(), r"module layers.0.first: the rule's solve gives a weight \(1, \d+\) and a bias"),
        (Twice(), "turns must give lists of .*it repeats layers.0"),
        (Flat(), r"turns must give lists of .*not \["),
        ({"_target_": f"{__name__}.Wrapped", "inward": 1}, "option inward is unknown"),
    ],
)
def test_mistakes_of_a_rule_are_named(rule: Any, message: str):
    with pytest.raises((CalibrationError, ValueError), match=message):
        run_fast(stack_suite(few_outputs), rule=rule)


def test_wrong_shapes_of_a_source_are_named():
    suite: Any = clip_suite()
    suite.experts["task_1"] = Cut(suite.experts["task_1"])
    with pytest.raises(CalibrationError, match=r"expert 'task_1': the source's tensor\('.*shape\("):
        run_fast(suite)


def test_a_changed_file_of_the_package_or_the_rule_is_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suite, folder = clip_suite(), {"checkpoint_dir": str(tmp_path / "blocks"), "rule": Wrapped()}
    run_fast(suite, **folder)
    run_fast(suite, **folder, resume=True)
    before, read = versions_of_software.__wrapped__(), Path.read_bytes
    changed = ("core", "moments.py")
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path.parts[-2:] == changed)
    )
    assert versions_of_software.__wrapped__() != before
    assert "class Wrapped" in str(own_code(Wrapped)) and own_code(Paper) is None
    monkeypatch.setattr(checkpoint, "own_code", lambda kind: "changed" if kind is Wrapped else None)
    with pytest.raises(CalibrationError, match="belongs to another run"):
        run_fast(suite, **folder, resume=True)


def test_a_channel_of_a_norm_that_does_not_vary_gives_finite_values():
    gain, shift = normal(3, 2, 2).double()
    expert = Linear(gain, shift)
    sums, rows = NormSums(expert, 0.0, 1e-8), NormRows(2, torch.zeros(1, dtype=torch.float64))
    rows.add(torch.ones(4, 2, dtype=torch.float64))
    sums.add("a", expert, rows)
    solved = sums.solve().linear
    assert torch.isfinite(solved.weight).all() and torch.isfinite(solved.bias).all()
