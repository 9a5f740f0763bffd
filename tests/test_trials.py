"""Several calibrations of one merged model, of which held-out samples choose one."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from calibrations import PLUS, assert_identical, distance, run_fast
from tiny_models import Suite, clip_suite, decoder_suite, scatter
from tricky_models import biased, stack_suite

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.results.remarks import is_information
from fusion_bench_featcal.trials import (
    CHANGES,
    Agreement,
    best_of,
    calibrations_of,
    outcome_of,
    warnings_of,
)

TRIED: dict[str, Any] = {**PLUS, "held_out": 2, "trials": 5, "task_weights": "drift"}
Outcome = Mapping[str, tuple[float, float, float]]
"""By task: cosine, the merged model's cosine, drift."""


def settings_of(**more: Any) -> FeatCalSettings:
    return FeatCalSettings(**(TRIED | more))


def result_of(outcome: Outcome) -> Any:
    log = CalibrationLog()
    for task, (cosine, merged, drift) in outcome.items():
        for block in ("first", "last"):  # the last block's record counts
            last = block == "last"
            log.add(
                "task",
                {
                    "task": task,
                    "held_out": 2,
                    "held_out_cosine": cosine if last else 0.0,
                    "held_out_cosine_merged": merged,
                    "held_out_drift": drift,
                },
            )
    return SimpleNamespace(log=log, reads={"totals": {"experts_read": 10}})


class Scripted:
    """Stands for calibrations, given what each will find."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes, self.calls = list(outcomes), list[tuple[FeatCalSettings, bool]]()

    def __call__(self, settings: FeatCalSettings, *, again: bool = False) -> Any:
        self.calls.append((settings, again))
        return result_of(self.outcomes[len(self.calls) - 1])

    def tried(self) -> list[dict[str, Any]]:
        """The settings of each that are not those of the first one."""
        first = self.calls[0][0].as_dict()
        return [
            {name: value for name, value in settings.as_dict().items() if value != first[name]}
            for settings, _ in self.calls
        ]


def flat(cosine: float, drift: float = 0.1) -> Outcome:
    return {"a": (cosine, 0.5, drift), "b": (cosine, 0.5, drift), "c": (cosine, 0.5, drift)}


FAR: Outcome = {"a": (0.9, 0.5, 0.1), "b": (0.9, 0.5, 0.1), "c": (0.6, 0.5, 0.4)}


def trials(result: Any) -> list[dict[str, Any]]:
    return result.log.of_kind("trial")


def test_the_highest_mean_cosine_is_kept_and_each_change_is_of_the_best_so_far():
    better = {**FAR, "a": (0.95, 0.5, 0.1)}
    script = Scripted(FAR, better, flat(0.2), flat(0.7), flat(0.97), flat(0.96))
    best = best_of(script, settings_of(trials=6), text=True)
    _, larger, still, weighted, rows, published = script.tried()
    assert larger == {"first_ridge_scale": 10.0}
    assert still == {"first_ridge_scale": 100.0}
    assert set(weighted) == {"first_ridge_scale", "task_weights"}
    assert rows == {"first_ridge_scale": 10.0, "row_weights": "sensitivity"}
    assert (published["order"], published["ridge"]) == ("block", "fixed")
    assert [record["kept"] for record in trials(best)] == [False] * 4 + [True, False]
    means = [record["cosine"] for record in trials(best)]
    assert means == pytest.approx([0.8, (0.95 + 0.9 + 0.6) / 3, 0.2, 0.7, 0.97, 0.96])


def test_what_was_kept_is_told():
    best = best_of(Scripted(FAR, flat(0.9)), settings_of(trials=2), text=True)
    (line,) = outcome_of(best.log)
    assert "of 2 calibrations number 2 was kept (first_ridge_scale=10.0)" in line
    assert "0.9000" in line and "as given 0.8000" in line
    assert outcome_of(CalibrationLog()) == []
    worse = best_of(Scripted(FAR, flat(0.1)), settings_of(trials=2), text=True)
    assert "of 2 calibrations the first was kept" in outcome_of(worse.log)[0]
    assert is_information(f"featcal: {line}") and is_information(outcome_of(worse.log)[0])


PAPERS: dict[str, Any] = {"order": "block", "target": "module", "ridge": "fixed", "stages": 1}
PAPERS |= {"row_weights": "uniform", "task_weights": None}


@pytest.mark.parametrize(
    ("settings", "behind", "said", "unsaid"),
    [
        ({}, "c", ["Raise method.samples_per_task, or drop the task"], ["featcal/plus"]),
        ({"task_weights": None}, "c", ["set method.task_weights=drift, "], ["featcal/plus"]),
        (PAPERS, "c", ["use method=featcal/plus, ", ", or drop the task"], ["set method"]),
        ({}, "abc", ["or check the calibration samples: all tasks are behind"], ["drop the task"]),
        (PAPERS, "abc", ["featcal/plus", "or check the calibration samples"], ["drop the task"]),
    ],
)
def test_advice_fits_the_run(
    settings: dict[str, Any], behind: str, said: list[str], unsaid: list[str]
):
    outcome = {task: (0.4 if task in behind else 0.9, 0.5, 0.1) for task in "abc"}
    lines = warnings_of(Agreement.of(result_of(outcome).log), settings_of(**settings))
    assert [line[0] for line in lines] == list(behind)
    for line in lines:
        assert all(text in line for text in said) and not any(text in line for text in unsaid)


def test_drift_weights_are_in_proportion_to_the_drift_and_have_mean_1():
    script = Scripted(FAR, flat(0.1), flat(0.99))
    best = best_of(script, settings_of(trials=3), text=False)
    wanted = {"a": 0.5, "b": 0.5, "c": 2.0}
    assert script.tried()[2] == {"task_weights": pytest.approx(wanted)}
    assert [record["kept"] for record in trials(best)] == [False, False, True]


def test_where_weights_have_helped_more_of_them_are_tried():
    better: Outcome = {**FAR, "c": (0.7, 0.5, 0.3)}
    script = Scripted(FAR, better, flat(0.1))
    best_of(script, settings_of(trials="auto"), text=False)
    _, first, second = (changes.get("task_weights") for changes in script.tried())
    assert first == pytest.approx({"a": 0.5, "b": 0.5, "c": 2.0})
    total = 0.5 * 0.1 + 0.5 * 0.1 + 2.0 * 0.3
    assert second == pytest.approx({"a": 0.15 / total, "b": 0.15 / total, "c": 1.8 / total})
    script = Scripted(FAR, flat(0.1), flat(0.1))
    best_of(script, settings_of(trials="auto"), text=False)
    assert len(script.calls) == 2  # the first have not helped


def test_language_models_get_larger_lambdas_while_these_help():
    auto = settings_of(trials="auto")
    script = Scripted(flat(0.7), flat(0.8), flat(0.9), flat(0.99))
    best_of(script, auto, text=True)
    scales = [changes.get("first_ridge_scale", 1.0) for changes in script.tried()]
    assert scales == [1.0, 10.0, 100.0]  # the drift is even
    script = Scripted(flat(0.7), flat(0.6), flat(0.9))
    best_of(script, auto, text=True)
    assert len(script.calls) == 2


def test_an_even_drift_is_not_weighed():
    script = Scripted(flat(0.9), flat(0.8), flat(0.7))
    best_of(script, settings_of(), text=False)
    assert [set(changes) for changes in script.tried()[:2]] == [set(), {"first_ridge_scale"}]
    assert "task_weights" not in script.tried()[2]
    assert script.tried()[2]["order"] == "block"  # the paper's


def test_a_change_that_puts_a_task_behind_the_merged_model_is_not_kept():
    behind: Outcome = {**flat(0.99), "b": (0.5, 0.5, 0.1)}
    best = best_of(Scripted(flat(0.6), behind), settings_of(trials=2), text=False)
    assert [record["kept"] for record in trials(best)] == [True, False]
    assert [record["behind"] for record in trials(best)] == [[], ["b"]]
    worse: Outcome = {**flat(0.6), "b": (0.4, 0.5, 0.1)}
    best = best_of(Scripted(worse, behind), settings_of(trials=2), text=False)
    assert [record["kept"] for record in trials(best)] == [False, True]  # it was behind before


@pytest.mark.parametrize("most", [2, 3, 4])
def test_no_more_calibrations_than_allowed(most: int):
    script = Scripted(*[FAR] * 9)
    best = best_of(script, settings_of(trials=most), text=True)
    assert len(script.calls) == len(trials(best)) == most
    assert [again for _, again in script.calls] == [False] + [True] * (most - 1)
    assert best.reads["totals"]["trials_read"] == 10 * most


def test_without_held_out_samples_there_is_one_calibration():
    script = Scripted({})
    best = best_of(script, settings_of(held_out="auto"), text=True)
    (record,) = trials(best)
    assert (record["trial"], record["cosine"], record["kept"]) == (1, None, True)


def test_every_change_is_a_setting_that_goes_with_the_others():
    settings = settings_of(decoder_rows="auto", row_weights="auto", augment="auto")
    for change in CHANGES:
        for text in (True, False):
            changed = change(settings, Agreement.of(result_of(FAR).log), text)
            assert changed is not None and settings.replace(**changed).held_out == 2


@pytest.mark.parametrize(
    ("more", "number"),
    [
        ({"trials": 1}, 1),
        ({"trials": 2}, 2),
        ({"trials": 99}, 6),
        ({"trials": 99, "task_weights": {"a": 2.0}}, 4),
        ({"trials": 99, "ridge": "fixed", "stages": 1}, 4),
        ({"trials": "auto"}, 3),
        ({"trials": "auto", "task_weights": None}, 1),
        ({"trials": "auto", "expert_read_budget": "50%"}, 1),
    ],
)
def test_most_calibrations(more: dict[str, Any], number: int):
    assert calibrations_of(settings_of(**more), text=False) == number


def test_most_calibrations_of_a_language_model():
    settings = settings_of(trials=99)
    assert calibrations_of(settings, text=True) == 7
    assert calibrations_of(settings.replace(trials="auto"), text=True) == 5
    assert calibrations_of(settings.replace(trials="auto", stages=1), text=True) == 3
    most = settings_of(trials="auto", first_ridge_scale=500)
    script = Scripted(flat(0.7), flat(0.8))
    best_of(script, most, text=True)
    assert len(script.calls) == 1  # the setting ends at 1000


def far_suite(
    make: Callable[[], Suite] = lambda: clip_suite(tasks=3, sizes=(6, 4), seed=4),
) -> Suite:
    """One expert is much farther from the merged model than the others."""
    suite = make()
    task = list(suite.experts)[-1]
    return replace(suite, experts=suite.experts | {task: scatter(suite.experts[task], 5, 0.8)})


@pytest.mark.parametrize(
    ("make", "changed"),
    [
        (far_suite, {"first_ridge_scale", "task_weights"}),
        pytest.param(
            lambda: far_suite(lambda: decoder_suite("llama", seed=1, tasks=3)),
            {"first_ridge_scale"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_model_that_is_kept_is_that_of_its_settings(
    make: Callable[[], Suite], changed: set[str]
):
    suite = make()
    found = run_fast(suite, **TRIED)
    records = trials(found)
    assert 3 <= len(records) <= 5 and records[0]["change"] == {}
    kept = next(index for index, record in enumerate(records) if record["kept"])
    highest = max(r["cosine"] for r in records if not set(r["behind"]) - set(records[0]["behind"]))
    assert records[kept]["cosine"] == highest
    change: dict[str, Any] = {}
    best = records[0]
    for record in records[: kept + 1]:  # each change is of the best before it
        if record["cosine"] >= best["cosine"]:
            change, best = change | record["change"], record
    assert set(change) == changed
    alone = run_fast(suite, **(TRIED | {"trials": 1, "task_weights": None} | change))
    assert_identical(found.model, alone.model)
    json.dumps(found.log.plain_records())


def test_drift_weights_help_the_task_that_is_far():
    suite = far_suite()
    once: dict[str, Any] = TRIED | {"trials": 1, "task_weights": None}
    seen = Agreement.of(run_fast(suite, **once).log)
    assert max(seen.drift, key=seen.drift.__getitem__) == "task_2"
    heavier: dict[str, Any] = once | {"task_weights": {"task_2": 3.0}}
    again = Agreement.of(run_fast(suite, **heavier).log)
    assert again.drift["task_2"] < seen.drift["task_2"]


def test_the_papers_update_is_tried_without_a_base_too():
    suite = clip_suite(tasks=2, sizes=(6, 4), seed=4)
    ways: list[dict[str, Any]] = [{"stages": 1}, {"anchor_rho": 1.0}]
    for way in ways:
        settings: dict[str, Any] = TRIED | {"trials": 9, "task_weights": None} | way
        found = run_fast(suite, has_base=False, **settings)
        assert trials(found)[-1]["change"]["order"] == "block"


def test_factors_scale_the_tasks_weights():
    suite = clip_suite(tasks=2)
    plain = run_fast(suite, **PLUS).model
    same = run_fast(suite, task_weights={"task_0": 3.0, "task_1": 3.0}, **PLUS).model
    assert distance(same, plain) < 1e-9  # no common factor matters
    other = run_fast(suite, task_weights={"task_0": 3.0}, **PLUS).model
    assert distance(other, plain) > 1e-4


def test_weights_of_unknown_tasks_are_refused():
    with pytest.raises(CalibrationError, match=r"task_weights names tasks \['travel'\].*no expert"):
        run_fast(clip_suite(tasks=2), task_weights={"travel": 2.0}, **PLUS)


def test_strict_refuses_a_model_that_is_no_closer_to_an_expert():
    suite = stack_suite(biased, tasks=1, sizes=(20, 17), seed=3)
    strict: dict[str, Any] = {**PLUS, "held_out": 5, "strict": True}
    assert_identical(run_fast(suite, **strict).model, run_fast(suite, held_out=5, **PLUS).model)
    already = replace(suite, experts=dict.fromkeys(suite.experts, suite.merged))
    with pytest.raises(CalibrationError, match=r"task_0: on 5 held-out samples.*no closer.*strict"):
        run_fast(already, **strict)


def test_in_place_goes_with_one_calibration_only():
    with pytest.raises(ValueError, match=r"in_place uses up the merged model.*method.trials=1"):
        run_fast(clip_suite(tasks=2), in_place=True, **TRIED)


def test_a_read_budget_is_for_one_calibration():
    with pytest.raises(ValueError, match=r"expert_read_budget is for one calibration"):
        settings_of(expert_read_budget="50%")


def test_each_trial_keeps_its_own_blocks(tmp_path: Path):
    suite, folder = far_suite(), tmp_path / "kept"
    whole = run_fast(suite, **TRIED)
    first = run_fast(suite, checkpoint_dir=str(folder), **TRIED)
    again = run_fast(suite, checkpoint_dir=str(folder), resume=True, **TRIED)
    for result in (first, again):
        assert_identical(result.model, whole.model)
    assert {path.name for path in folder.glob("trial-*")} == {
        f"trial-{record['trial']}" for record in trials(whole)[1:]
    }
    assert again.log.of_kind("resumed")
