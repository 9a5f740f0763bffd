"""What a grid may hold, and what is refused before anything is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import MERGERS, Refusing, Scale, comparison, method, model_pool
from torch import nn

from fusion_bench_featcal.comparison import Chain, ComparisonAlgorithm, FeatCal
from fusion_bench_featcal.comparison.grid import GridChoices, for_pool, make_grid
from fusion_bench_featcal.comparison.methods import seed_of
from fusion_bench_featcal.settings import CalibrationError

FEATCAL = {"_target_": "fusion_bench_featcal.comparison.FeatCal", "seed": 3}


def grid(presets: Any = None, **choices: Any) -> Any:
    defaults = {"upstream_mergers": MERGERS, "post_merging_methods": {"double": method(Scale)}}
    return make_grid(GridChoices(**(defaults | choices)), presets or {})


def test_everything_is_run_unless_chosen() -> None:
    every = grid(mergers_alone={"alone": MERGERS["simple_average"]})
    cells = {merger.name: every.cells_of(merger) for merger in every.mergers}
    assert cells == {
        "simple_average": ["none", "double"],
        "task_arithmetic": ["none", "double"],
        "alone": ["none"],
    }
    assert every.references == ["base", "experts"]
    assert len(every) == 7


def test_merger_without_post_merging_is_always_run() -> None:
    chosen = grid(upstreams=["task_arithmetic"], cells=["double"], references=[])
    assert [chosen.cells_of(merger) for merger in chosen.mergers] == [["none", "double"]]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"cells": ["duoble"]}, r"method\.cells: 'duoble' is unknown; the nearest is 'double'"),
        ({"upstreams": ["ties"]}, r"method\.upstreams: 'ties' is unknown.*task_arithmetic"),
        ({"alone": ["regmean"]}, r"method\.alone: 'regmean' is unknown"),
        ({"references": ["expert"]}, r"method\.references: 'expert' is unknown.*'experts'"),
        ({"cells": "double"}, r"method\.cells must be a list of names"),
        ({"upstreams": []}, r"the grid is empty"),
        ({"cells": []}, r"the grid is empty"),
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


def test_entry_set_to_null_is_taken_out() -> None:
    assert list(grid(post_merging_methods={"a": method(Scale), "b": None}).cells) == ["a"]


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
    assert seed_of(cell.settings) == 42


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
    ("choices", "error", "message"),
    [
        ({"cells": ["unknown"]}, ValueError, "unknown"),
        ({"upstreams": []}, ValueError, "empty"),
        (
            {"post_merging_methods": {"refusing": method(Refusing)}},
            CalibrationError,
            r"post_merging_methods\.refusing: the pool has no such stream",
        ),
    ],
)
def test_refusal_comes_before_any_model_is_loaded(
    choices: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    pool: Any = NoModels()
    with pytest.raises(error, match=message):
        comparison(tmp_path, **choices).run(pool)
    assert not (tmp_path / "results").exists()


def test_comparison_needs_a_task_pool(tmp_path: Path) -> None:
    algorithm: Any = comparison(tmp_path, post_merging_methods={"double": method(Scale)})
    algorithm._program.taskpool = None
    with pytest.raises(CalibrationError, match="taskpool="):
        algorithm.run(model_pool())


def test_comparison_saves_no_model(tmp_path: Path) -> None:
    algorithm: Any = comparison(tmp_path, post_merging_methods={"double": method(Scale)})
    algorithm._program.merged_model_save_path = "somewhere"
    with pytest.raises(CalibrationError, match="merged_model_save_path"):
        algorithm.run(model_pool())


@pytest.mark.parametrize("choices", [{"seed": -1}, {"seed": True}, {"upstream": ["wudi"]}])
def test_bad_key_is_named(choices: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"method\.{next(iter(choices))}"):
        ComparisonAlgorithm(**choices)


def test_pool_leaves_entries_out_and_sets_others() -> None:
    choices = GridChoices(
        upstream_mergers={"wudi": {"_target_": "m", "iter_num": 3}, "ties": None, **MERGERS},
        post_merging_methods={"scale": method(Scale), "twice": method(Scale)},
    )
    changes = {
        "leave_out": {"twice": "it is too much", "simple_average": "it is too plain"},
        "upstream_mergers": {
            "wudi": {"exclude_keys": ["head"]}, "ties": {"a": 1}, "absent": {"a": 1}
        },
    }  # fmt: skip
    changed, left_out = for_pool(choices, changes)
    grid = make_grid(changed, {}, left_out)
    assert [merger.name for merger in grid.mergers] == ["wudi", "task_arithmetic"]
    assert grid.mergers[0].config == {"_target_": "m", "iter_num": 3, "exclude_keys": ["head"]}
    assert list(grid.cells) == ["scale"]
    chosen, left_out = for_pool(replace(choices, cells=["twice"]), changes)
    assert list(make_grid(chosen, {}, left_out).cells) == ["twice"]
    with pytest.raises(ValueError, match=r"modelpool\.featcal\.compare: \['upstream'\] unknown"):
        for_pool(choices, {"upstream": {}})
