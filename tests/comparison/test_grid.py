"""Grids that are made of keys, and those refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Refusing, Scale, comparison, method, model_pool
from configs import composed
from omegaconf import OmegaConf
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.compare import Chain, ComparisonAlgorithm, FeatCal
from fusion_bench_featcal.lab.compare.grid import GridChoices, make_grid

WUDI = "fusion_bench.method.WUDIMerging"
FEATCAL = {"_target_": "fusion_bench_featcal.lab.compare.FeatCal", "seed": 3}


def grid(presets: Any = None, **choices: Any) -> Any:
    defaults = {"upstream_mergers": MERGERS, "post_merging_methods": {"double": method(Scale)}}
    return make_grid(GridChoices(**(defaults | choices)), {"presets": presets})


def test_everything_is_run_unless_chosen_or_set_to_null() -> None:
    methods = {"double": method(Scale), "null": None}
    every = grid(mergers_alone={"alone": MERGERS["simple_average"]}, post_merging_methods=methods)
    cells = {merger.name: every.cells_of(merger) for merger in every.mergers}
    assert cells == {
        "simple_average": ["none", "double"],
        "task_arithmetic": ["none", "double"],
        "alone": ["none"],
    }
    assert every.references == ["base", "experts"]
    assert len(every) == 7
    chosen = grid(upstreams=["task_arithmetic"], post_merging=["double"], references=[])
    assert [chosen.cells_of(merger) for merger in chosen.mergers] == [["none", "double"]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"post_merging": ["duoble"]},
            r"method\.post_merging: 'duoble' is unknown.*nearest: 'double'",
        ),
        ({"upstreams": ["ties"]}, r"method\.upstreams: 'ties' is unknown.*task_arithmetic"),
        ({"alone": ["regmean"]}, r"method\.alone: 'regmean' is unknown"),
        ({"references": ["expert"]}, r"method\.references: 'expert' is unknown.*'experts'"),
        ({"post_merging": "double"}, r"method\.post_merging must be a list of names"),
        (
            {"upstream_mergers": {"../x": MERGERS["simple_average"]}},
            r"upstream_mergers: '\.\./x' cannot name a file",
        ),
        ({"upstreams": []}, r"the grid is empty"),
        ({"post_merging": []}, r"the grid is empty"),
        ({"upstream_mergers": {"x": "task_arithmetic"}}, r"\+method@method\.upstream_mergers\.x="),
        ({"post_merging_methods": {"x": {"a": 1}}}, r"methods\.x must have a _target_"),
        ({"post_merging_methods": {"x": ["y"]}}, r"methods\.x: a list names other methods"),
        ({"post_merging_methods": {"x": ["x"]}}, r"methods\.x: a list names other methods"),
        ({"post_merging_methods": {"x": {"_target_": "builtins.dict"}}}, r"is no post-merging"),
        ({"post_merging_methods": {"base": method(Scale)}}, r"'base' names two rows"),
        ({"post_merging_methods": {"simple_average": method(Scale)}}, r"names two rows"),
        (
            {"post_merging_methods": {"featcal": FEATCAL | {"ridge_lamda": 1}}},
            r"post_merging_methods\.featcal.*ridge_lamda.*'ridge_lambda'",
        ),
        (
            {"post_merging_methods": {"featcal": FEATCAL | {"mix_alpha": 7}}},
            r"post_merging_methods\.featcal\.mix_alpha must be",
        ),
    ],
)
def test_bad_grid_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grid(**choices)


CORRECTION = "fusion_bench_featcal.lab.compare.FeatureCorrection"
REGMEAN = "fusion_bench_featcal.lab.rivals.RegMeanAlgorithm"
ANCHOR = "fusion_bench_featcal.lab.compare.AnchorOnly"


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("post_merging_methods", {"_target_": "no_such.Method"}, r"=no_such\.Method cannot be"),
        ("upstream_mergers", {"_target_": "no_such.Merger"}, r"=no_such\.Merger cannot be"),
        ("mergers_alone", {"_target_": "no_such.Merger"}, r"cannot be imported: .*no_such"),
        ("upstream_mergers", {"_target_": "fusion_bench.method.Simpel"}, r"cannot be imported"),
        ("upstream_mergers", {"name": "clip_layer_wise_adamergin"}, r"no method .*nearest"),
        ("post_merging_methods", method(Scale, facter=2), r"x\.facter is unknown.*'factor'"),
        ("upstream_mergers", MERGERS["task_arithmetic"] | {"scaling_facter": 1}, "_factor'"),
        ("mergers_alone", {"_target_": REGMEAN, "sampels_per_task": 8}, r"'samples_per_task'"),
        ("mergers_alone", {"_target_": REGMEAN, "off_diag": 8}, r"x\.off_diag .*'off_diagonal'"),
        ("mergers_alone", {"_target_": REGMEAN, "samples_per_task": 0}, "_per_task must be"),
        ("post_merging_methods", {"_target_": ANCHOR, "anchor_roh": 2}, r"nearest: 'anchor_rho'"),
        (
            "post_merging_methods",
            {"_target_": CORRECTION, "method": "surgery", "stpes": 3},
            r"x\.stpes .*nearest: 'steps'",
        ),
        (
            "post_merging_methods",
            {"_target_": CORRECTION, "method": "surgery_v2", "clip_modle": "x"},
            r"x\.clip_modle .*nearest: 'clip_model'",
        ),
        (
            "post_merging_methods",
            {"_target_": CORRECTION, "method": "surgry"},
            r"x\.method must be one of surgery.*nearest: 'surgery'",
        ),
        ("post_merging_methods", {"_target_": CORRECTION, "metod": "surgery"}, r"x: .*'method'"),
        ("post_merging_methods", method(Refusing), r"x: the pool has no such stream"),
    ],
)  # fmt: skip
def test_wrong_entry_is_named_before_anything_is_loaded(
    key: str, entry: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pool: Any = NoModels()
    with pytest.raises((ValueError, CalibrationError), match=message) as caught:
        comparison(tmp_path, **{key: {"x": entry}}).run(pool)
    text = str(caught.value)
    assert f"method.{key}.x" in text and text.count("\n") == 0 and len(text) < 600
    assert not (tmp_path / "results").exists()


def test_steps_reach_every_method_that_trains() -> None:
    config = composed("method=compare", "modelpool=clip-vit-mini_TA6", "method.steps=7").method
    methods = OmegaConf.to_container(config.post_merging_methods, resolve=True)
    assert isinstance(methods, dict)
    every = [m.get("of", m) for m in methods.values() if isinstance(m, dict)]
    assert [m["steps"] for m in every if "steps" in m] == [7] * 12


def test_presets_of_the_suite_are_cells() -> None:
    cells = grid({"mini": {"mix_alpha": 0.5}}, post_merging_methods={"featcal": FEATCAL}).cells
    assert list(cells) == ["featcal", "featcal:mini"]
    assert isinstance(cells["featcal:mini"], FeatCal)
    assert cells["featcal:mini"].settings["mix_alpha"] == 0.5
    assert cells["featcal:mini"].settings["seed"] == 3


def test_list_applies_methods_in_order() -> None:
    methods = {
        "double": method(Scale),
        "third": method(Scale, factor=3),
        "six": ["double", "third"],
    }
    cell = grid(post_merging_methods=methods).cells["six"]
    assert isinstance(cell, Chain)
    assert cell.settings == {
        "double": {"factor": 2.0, "seed": 42},
        "third": {"factor": 3, "seed": 42},
    }
    assert cell.samples(nn.Identity(), ["left"]) == {"left": {"samples": 5, "split": "train"}}


class NoModels:
    """A pool whose models must not be asked for."""

    def __init__(self) -> None:
        pool = model_pool()
        self._models = pool._models
        self.has_pretrained = True
        self.all_model_names = pool.all_model_names
        self.model_names = pool.model_names

    def load_model(self, name: str) -> None:
        raise AssertionError(f"{name} was loaded")


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [("taskpool", None, "taskpool="), ("merged_model_save_path", "x", "merged_model_save_path")],
)
def test_program_that_does_not_suit_is_refused(
    attribute: str, value: Any, message: str, tmp_path: Path
) -> None:
    algorithm: Any = comparison(tmp_path, post_merging_methods={"double": method(Scale)})
    setattr(algorithm._program, attribute, value)
    with pytest.raises(CalibrationError, match=message):
        algorithm.run(model_pool())


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"seed": -1}, r"method\.seed must be"),
        ({"seed": True}, r"method\.seed must be"),
        ({"upstream": ["wudi"]}, r"method\.upstream .*nearest: 'upstreams'"),
        ({"stepz": 1}, r"method\.stepz .*nearest: 'steps'"),
    ],
)
def test_bad_key_is_named(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ComparisonAlgorithm(**choices)


def test_pool_leaves_entries_out_and_sets_others() -> None:
    choices = GridChoices(
        upstream_mergers={"wudi": {"_target_": WUDI, "iter_num": 3}, "ties": None, **MERGERS},
        post_merging_methods={"scale": method(Scale), "twice": method(Scale)},
    )
    changes = {
        "leave_out": {"twice": "it is too much", "simple_average": "it is too plain"},
        "upstream_mergers": {
            "wudi": {"exclude_keys": ["head"]}, "ties": {"a": 1}, "absent": {"a": 1}
        },
    }  # fmt: skip
    grid = make_grid(choices, {"compare": changes})
    assert [merger.name for merger in grid.mergers] == ["wudi", "task_arithmetic"]
    assert grid.mergers[0].config == {"_target_": WUDI, "iter_num": 3, "exclude_keys": ["head"]}
    assert list(grid.cells) == ["scale"]
    chosen = replace(choices, post_merging=["twice"])
    assert list(make_grid(chosen, {"compare": changes}).cells) == ["twice"]
    kept_back = replace(choices, leave_out={"scale": "it is slow"})
    assert list(make_grid(kept_back, {}).cells) == ["twice"]
    with pytest.raises(ValueError, match=r"modelpool\.featcal\.compare: \['upstream'\] unknown"):
        make_grid(choices, {"compare": {"upstream": {}}})
