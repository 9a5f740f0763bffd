"""Grids that are made of keys, and grids that are refused before anything is loaded."""

from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Scale, comparison, method, model_pool
from tiny_pools import refusing

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare import FeatCal

AVERAGE, ARITHMETIC = MERGERS.values()
METHODS, UPSTREAM = "post_merging_methods", "upstream_mergers"
FEATCAL = {"_target_": "fusion_bench_featcal.lab.compare.FeatCal", "seed": 3}
CORRECTION = {"_target_": "fusion_bench_featcal.lab.compare.FeatureCorrection"}
WUDI = {"_target_": "fusion_bench.method.WUDIMerging", "iter_num": 3}


def grid(suite: Any = None, **choices: Any) -> Any:
    choices = {METHODS: {"double": method(Scale)}} | choices
    return comparison(Path("never"), **choices).grid({"featcal": suite or {}})


def test_everything_is_run_unless_chosen_or_set_to_null() -> None:
    methods = {"double": method(Scale), "null": None}
    whole = grid(mergers_alone={"alone": AVERAGE}, post_merging_methods=methods)
    cells = {merger.name: whole.cells_of(merger) for merger in whole.mergers}
    assert cells == {**{name: ["none", "double"] for name in MERGERS}, "alone": ["none"]}
    assert whole.references == ["base", "experts"] and len(whole) == 7
    chosen = grid(upstreams=["task_arithmetic"], post_merging=["double"], references=[])
    assert len(chosen) == 2


def test_presets_of_the_suite_are_cells() -> None:
    cells = grid({"presets": {"mini": {"mix_alpha": 0.5}}}, **{METHODS: {"featcal": FEATCAL}}).cells
    assert list(cells) == ["featcal", "featcal:mini"] and isinstance(cells["featcal:mini"], FeatCal)
    assert [cells["featcal:mini"].settings[key] for key in ("mix_alpha", "seed")] == [0.5, 3]


def test_a_pool_leaves_entries_out_and_sets_others() -> None:
    choices: Any = {
        "upstream_mergers": {"wudi": WUDI, "ties": None, **MERGERS},
        "post_merging_methods": {"scale": method(Scale), "twice": method(Scale)},
    }
    changed = {"wudi": {"exclude_keys": ["head"]}, "ties": {"a": 1}, "absent": {"a": 1}}
    leave_out = {"twice": "it is too much", "simple_average": "it is too plain"}
    suite = {"compare": {"leave_out": leave_out, "upstream_mergers": changed}}
    result = grid(suite, **choices)
    assert [merger.name for merger in result.mergers] == ["wudi", "task_arithmetic"]
    assert result.mergers[0].config == WUDI | {"exclude_keys": ["head"]}
    assert list(result.cells) == ["scale"]
    assert list(grid(suite, **choices, post_merging=["twice"]).cells) == ["twice"]
    assert list(grid(**choices, leave_out={"scale": "it is slow"}).cells) == ["twice"]
    with pytest.raises(ValueError, match=r"modelpool\.featcal\.compare: \['upstream'\] unknown"):
        grid({"compare": {"upstream": {}}})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"upstream": ["wudi"]}, r"method\.upstream .*nearest: 'upstreams'"),
    # names
    ({"post_merging": ["duoble"]}, r"method\.post_merging: 'duoble' is unknown.*: 'double'"),
    ({"upstreams": ["ties"]}, r"method\.upstreams: 'ties' is unknown.*task_arithmetic"),
    ({UPSTREAM: {"../x": AVERAGE}}, r"upstream_mergers: '\.\./x' cannot name a file"),
    ({"upstreams": []}, r"the grid is empty"),
    # entries
    ({UPSTREAM: {"x": "task_arithmetic"}}, r"\+method@method\.upstream_mergers\.x="),
    ({UPSTREAM: {"x": {"_target_": "no_such.Merger"}}}, r"mergers\.x.*=no_such\.Merger cannot be"),
    # settings of entries
    ({UPSTREAM: {"x": ARITHMETIC | {"scaling_facter": 1}}}, r"method\.upstream_mergers.*_factor'"),
    (
        {METHODS: {"x": FEATCAL | {"ridge_lamda": 1}}},
        r"ing_methods\.x.*ridge_lamda.*'ridge_lambda'",
    ),
    ({METHODS: {"x": CORRECTION | {"method": "surgry"}}}, r"must be one of surgery.*: 'surgery'"),
]


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
