"""Custom rules, derived from the base class."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from calibrations import Overheard, assert_identical, run_fast
from tiny_models import clip_suite
from torch import Tensor
from tricky_models import few_outputs, stack_suite

from fusion_bench_featcal import CalibrationError, FeatCalSettings, Paper, calibrate
from fusion_bench_featcal.rules import GroupSums, Linear, Rule, Solved, rule_of
from fusion_bench_featcal.run import checkpoint, own_code, versions_of_software


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


class Cut(Overheard):
    """A source whose matrices lack their last row."""

    def tensor(self, name: str) -> Tensor:
        whole = super().tensor(name)
        return whole[:-1] if whole.ndim == 2 else whole


@dataclass(frozen=True)
class OneRow(Wrapped):
    """Gives only the first row of each weight."""

    def sums(self, group: Any, merged: Linear, base: Linear | None) -> GroupSums:
        sums: Any = super().sums(group, merged, base)
        solve = sums.solve
        sums.solve = lambda: Solved(Linear(solve().linear.weight[:1], merged.bias))
        return sums


def test_wrong_shapes_of_a_rule_or_a_source_are_named() -> None:
    shapes = r"module layers.0.first: the rule's solve gives a weight \(1, \d+\) and a bias"
    with pytest.raises(CalibrationError, match=shapes):
        calibrated(OneRow())
    suite = clip_suite()
    suite.experts["task_1"] = Cut(suite.experts["task_1"])  # type: ignore[assignment]
    with pytest.raises(CalibrationError, match=r"expert 'task_1': the source's tensor\('.*shape\("):
        run_fast(suite)


def test_an_unknown_option_of_a_rule_is_refused() -> None:
    target = f"{__name__}.Wrapped"
    with pytest.raises(ValueError, match=r"option inward is unknown"):
        rule_of(FeatCalSettings(rule={"_target_": target, "inward": 1}))


@dataclass(frozen=True)
class Twice(Wrapped):
    """Solves its first group in two turns."""

    def turns(self, groups: Any) -> Any:
        return [groups, groups[:1]]


@dataclass(frozen=True)
class Flat(Wrapped):
    """Gives groups in place of turns."""

    def turns(self, groups: Any) -> Any:
        return groups


@pytest.mark.parametrize(("rule", "words"), [(Twice(), "it repeats layers.0"), (Flat(), "not \\[")])
def test_wrong_turns_are_refused(rule: Rule, words: str) -> None:
    with pytest.raises(CalibrationError, match=f"turns must give lists of .*{words}"):
        calibrated(rule)


def test_a_changed_file_of_the_package_is_another_run(monkeypatch: Any) -> None:
    before, read = versions_of_software.__wrapped__(), Path.read_bytes
    changed = ("core", "moments.py")
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: read(path) + b"#" * (path.parts[-2:] == changed)
    )
    assert versions_of_software.__wrapped__() != before


def test_a_changed_file_of_a_rule_is_another_run(tmp_path: Path, monkeypatch: Any) -> None:
    suite, folder = clip_suite(), str(tmp_path / "blocks")
    run_fast(suite, rule=Wrapped(), checkpoint_dir=folder)
    run_fast(suite, rule=Wrapped(), checkpoint_dir=folder, resume=True)
    monkeypatch.setattr(checkpoint, "own_code", lambda kind: "changed" if kind is Wrapped else None)
    with pytest.raises(CalibrationError, match="belongs to another run"):
        run_fast(suite, rule=Wrapped(), checkpoint_dir=folder, resume=True)
    assert "class Wrapped" in str(own_code(Wrapped)) and own_code(Paper) is None


def test_a_class_in_place_of_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"settings or a rule, such as Paper\(\), not <class"):
        calibrated(Paper)
