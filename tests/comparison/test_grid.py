"""Rows that are made of keys, and rows that are refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Scale, comparison, method, model_pool
from tiny_pools import refusing

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare.grid import Cell, cells_of
from fusion_bench_featcal.lab.rivals import FeatCal

AVERAGE, ARITHMETIC = MERGERS.values()
METHODS, UPSTREAM = "post_merging_methods", "upstream_mergers"
FEATCAL = {"_target_": "fusion_bench_featcal.lab.rivals.FeatCal", "seed": 3}
SURGERY = {"_target_": "fusion_bench_featcal.lab.rivals.Surgery"}
WUDI = {"_target_": "fusion_bench.method.WUDIMerging", "iter_num": 3}


def cells(suite: Any = None, **choices: Any) -> list[Cell]:
    choices = {METHODS: {"double": method(Scale)}} | choices
    return cells_of(comparison(Path("never"), **choices).settings, suite or {})


def titles(*args: Any, **choices: Any) -> list[str]:
    return [cell.title for cell in cells(*args, **choices)]


def test_everything_is_run_unless_chosen_or_set_to_null() -> None:
    methods = {"double": method(Scale), "null": None}
    whole = titles(mergers_alone={"alone": AVERAGE}, post_merging_methods=methods)
    over = [title for name in MERGERS for title in (name, f"{name}+double")]
    assert whole == ["base", "experts", *over, "alone"]
    chosen = titles(upstreams=["task_arithmetic"], post_merging=["none", "double"], references=[])
    assert chosen == ["task_arithmetic", "task_arithmetic+double"]


def test_presets_of_the_suite_are_rows() -> None:
    suite = {"presets": {"mini": {"mix_alpha": 0.5}}}
    methods = {c.row: c.method for c in cells(suite, **{METHODS: {"featcal": FEATCAL}}) if c.method}
    assert list(methods) == ["featcal", "featcal_mini"]
    assert isinstance(methods["featcal_mini"], FeatCal)
    assert [methods["featcal_mini"].settings[key] for key in ("mix_alpha", "seed")] == [0.5, 3]


def test_a_pool_leaves_entries_out() -> None:
    choices: Any = {
        "upstream_mergers": {"wudi": WUDI, "ties": None, **MERGERS}, "references": [],
        "post_merging_methods": {"scale": method(Scale), "twice": method(Scale)},
    }  # fmt: skip
    leave_out = {"twice": "it is too much", "simple_average": "it is too plain"}
    suite = {"compare": {"leave_out": leave_out}}
    expected = ["wudi", "wudi+scale", "task_arithmetic", "task_arithmetic+scale"]
    assert titles(suite, **choices) == expected
    assert "wudi+twice" in titles(suite, **choices, post_merging=["twice"])
    assert "wudi+scale" not in titles(**choices, leave_out={"scale": "it is slow"})
    with pytest.raises(ValueError, match=r"modelpool\.featcal\.compare\.upstream is unknown"):
        cells({"compare": {"upstream": {}}})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"upstream": ["wudi"]}, r"method\.upstream .*nearest: 'upstreams'"),
    # names
    ({"post_merging": ["duoble"]}, r"method\.post_merging: 'duoble' is unknown.*: 'double'"),
    ({"upstreams": ["ties"]}, r"method\.upstreams: 'ties' is unknown.*task_arithmetic"),
    ({UPSTREAM: {"../x": AVERAGE}}, r"upstream_mergers\.\.\./x: the name is that of a folder"),
    ({UPSTREAM: {"double": AVERAGE}}, r"'double' names two rows"),
    ({"upstreams": []}, r"there is nothing to run"),
    ({"tasks": ["rihgt"]}, r"method\.tasks: 'rihgt' is unknown.*'right'"),
    ({"tasks": 3}, r"method\.tasks=3, but the pool has 2 tasks"),
    # entries
    ({UPSTREAM: {"x": "task_arithmetic"}}, r"\+method@method\.upstream_mergers\.x="),
    ({UPSTREAM: {"x": {"_target_": "no_such.Merger"}}}, r"mergers\.x.*=no_such\.Merger cannot be"),
    # settings of entries
    ({UPSTREAM: {"x": ARITHMETIC | {"scaling_facter": 1}}}, r"method\.upstream_mergers.*_factor'"),
    (
        {METHODS: {"x": FEATCAL | {"ridge_lamda": 1}}},
        r"ing_methods\.x.*ridge_lamda.*'ridge_lambda'",
    ),
    ({METHODS: {"x": SURGERY | {"rank": 0}}}, r"post_merging_methods\.x\.rank must be an integer"),
    ({METHODS: {"x": AVERAGE}}, r"is no post-merging method: derive it"),
    ({METHODS: {"x": FEATCAL | {"calibration_corruption": {"kind": "frog", "severity": 3}}}},
     r"x\.calibration_corruption must be null or \{kind: \.\.\., severity"),
]  # fmt: skip


@pytest.mark.parametrize(("choices", "message"), REFUSED)
def test_wrong_choices_are_named_before_anything_is_loaded(
    choices: dict[str, Any], message: str, tmp_path: Path
) -> None:
    choices = {METHODS: {"double": method(Scale)}} | choices
    with pytest.raises((ValueError, CalibrationError), match=message) as caught:
        comparison(tmp_path, **choices).run(refusing(model_pool()))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 600 and not (tmp_path / "results").exists()


def test_a_comparison_saves_no_model(tmp_path: Path) -> None:
    algorithm = comparison(tmp_path)
    algorithm._program.merged_model_save_path = "x"
    with pytest.raises(CalibrationError, match="merged_model_save_path"):
        algorithm.run(model_pool())
