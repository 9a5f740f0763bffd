"""Families and rules of another installed package, by their names alone."""

import sys
from pathlib import Path
from typing import Any

import pytest
from calibrations import assert_identical
from tiny_models import clip_suite

from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.families import STACK, resolve_family
from fusion_bench_featcal.lab.listing import listing

MODULE = """
from dataclasses import dataclass
from fusion_bench_featcal.families import Stack
from fusion_bench_featcal.rules.plus import Plus

class Towers(Stack):
    def __init__(self):
        super().__init__(BLOCKS)

@dataclass(frozen=True)
class Mine(Plus):
    pass
"""
ENTRY_POINTS = """
[fusion_bench_featcal.families]
towers = tiny_featcal_package:Towers
odd_type = tiny_featcal_package:Towers
[fusion_bench_featcal.rules]
mine = tiny_featcal_package:Mine
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip installs it."""
    (tmp_path / "tiny_featcal_package.py").write_text(
        MODULE.replace("BLOCKS", repr((*clip_suite().blocks,)))
    )
    info = tmp_path / "tiny_featcal_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tiny_featcal_package\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tiny_featcal_package", raising=False)


@pytest.mark.usefixtures("package")
def test_a_family_and_a_rule_of_another_package_are_found_by_their_names() -> None:
    suite = clip_suite()
    parts: Any = (suite.merged, suite.base, suite.experts, suite.inputs)
    assert "tiny_featcal_package" not in sys.modules
    assert "t5, whisper, towers, odd_type" in " ".join(listing().split())
    assert "tiny_featcal_package" not in sys.modules  # names alone are read
    result: Any = calibrate(*parts, FeatCalSettings(rule="mine", family="towers"))  # type: ignore
    assert type(FeatCalSettings(rule="mine").rule_object).__name__ == "Mine"
    reference: Any = calibrate(*parts, FeatCalSettings(rule="plus"))  # type: ignore
    assert_identical(result.model, reference.model)


@pytest.mark.usefixtures("package")
def test_auto_takes_a_family_with_the_name_of_an_unknown_model_type() -> None:
    model: Any = clip_suite().merged
    model.config.model_type = "odd_type"
    assert type(resolve_family("auto", model)).__name__ == "Towers"
    model.config.model_type = "other"
    assert resolve_family("auto", model) is STACK


def test_unknown_names_are_refused_without_the_package() -> None:
    with pytest.raises(ValueError, match=r"rule must be paper, plus, .* got 'mine'"):
        FeatCalSettings(rule="mine")
    with pytest.raises(ValueError, match=r"family must be auto, clip, .* got 'towers'"):
        resolve_family("towers", clip_suite().merged)
