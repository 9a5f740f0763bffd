"""Points of a study: what its axes make of the config, and what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.lab.compare.axes import Design
from fusion_bench_featcal.lab.compare.points import Point


def config(**method: Any) -> DictConfig:
    names = ["_pretrained_", "a", "b", "c", "d"]
    return OmegaConf.create(
        {
            "method": {
                "samples_per_task": 256,
                "post_merging_methods": {
                    "featcal": {"samples_per_task": "${method.samples_per_task}", "mix_alpha": 0.2}
                },
                **method,
            },
            "modelpool": {
                "models": {name: f"path/{name}" for name in names},
                "train_datasets": {name: {"task": name} for name in names[1:]},
            },
            "taskpool": {
                "test_datasets": {name: "${modelpool.models." + name + "}" for name in names[1:]}
            },
        }
    )  # fmt: skip


def labels(design: Design, **method: Any) -> list[dict[str, Any]]:
    return [point.labels for point in design.points(config(**method))]


def test_product_has_every_combination_with_every_seed() -> None:
    axes = {"samples_per_task": [8, 64], "ridge_lambda": [0.1, 1, 10]}
    points = Design(axes=axes, seeds=[1, 2]).points(config())
    found = [(p.labels["samples_per_task"], p.labels["ridge_lambda"], p.seed) for p in points]
    assert found == [(n, r, seed) for n in (8, 64) for r in (0.1, 1, 10) for seed in (1, 2)]


def test_each_axis_moves_by_itself_around_the_present_settings() -> None:
    axes = {"ridge_lambda": [0.05, 1], "mix_alpha": [0, 0.2]}
    found = labels(Design(axes=axes, design="each", seeds=[1]))
    assert found == [
        {"ridge_lambda": 0.05, "mix_alpha": 0.2},  # the default, and what the config has
        {"ridge_lambda": 1, "mix_alpha": 0.2},
        {"ridge_lambda": 0.05, "mix_alpha": 0},
    ]


def test_a_pair_adds_its_plane() -> None:
    axes = {"ridge_lambda": [0.05, 1], "mix_alpha": [0, 0.2], "anchor_rho": [1, 2]}
    pair = Design(axes=axes, design="each", seeds=[1], pairs=[["ridge_lambda", "mix_alpha"]])
    found = labels(pair)
    assert {"ridge_lambda": 1, "mix_alpha": 0, "anchor_rho": 2.0} in found
    assert len(found) == 4 + 1
    assert len({tuple(entry.items()) for entry in found}) == len(found)


def test_interpolations_resolve_to_the_points_values() -> None:
    (point,) = Design(axes={"samples_per_task": [8]}, seeds=[7]).points(config())
    changed = point.changed(config())
    assert changed.method.post_merging_methods.featcal.samples_per_task == 8
    assert changed.method.seed == 7
    assert config().method.samples_per_task == 256


def test_labels_of_ones_own_change_any_key() -> None:
    axes = {"data": {"own": {}, "other": {"modelpool.train_datasets": {"a": {"task": "z"}}}}}
    own, other = Design(axes=axes, seeds=[1]).points(config())
    assert (own.labels, other.labels) == ({"data": "own"}, {"data": "other"})
    assert own.changed(config()).modelpool == config().modelpool
    assert other.changed(config()).modelpool.train_datasets == {"a": {"task": "z"}}


def test_subsets_of_tasks_are_in_both_pools() -> None:
    points = Design(axes={"tasks": [2, 4, 5]}, seeds=[1]).points(config())
    assert len(points) == 6 + 1  # the pool has no five tasks
    for point in points:
        changed, chosen = point.changed(config()), point.labels["subset"].split("+")
        assert list(changed.modelpool.models) == ["_pretrained_", *chosen]
        assert list(changed.modelpool.train_datasets) == chosen
        assert changed.taskpool.test_datasets == {task: f"path/{task}" for task in chosen}
        assert point.labels["tasks"] == len(chosen)


def test_a_task_pools_list_of_tasks_is_cut_as_well() -> None:
    whole = config()
    whole.taskpool.tasks = ["a", "b", "c"]
    point, *_ = Design(axes={"tasks": [2]}, seeds=[1]).points(whole)
    assert point.changed(whole).taskpool.tasks == ["a", "b"]


def test_a_labelled_axis_stays_at_its_first_label() -> None:
    axes = {"kind": {"one": {"method.x": 1}, "two": {"method.x": 2}}, "ridge_lambda": [1]}
    points = Design(axes=axes, design="each", seeds=[1]).points(config())
    found = [(p.labels["kind"], p.labels["ridge_lambda"], p.changes["method.x"]) for p in points]
    assert found == [("one", 0.05, 1), ("two", 0.05, 2), ("one", 1, 1)]


def test_corruptions_stay_clean_beside_other_axes() -> None:
    axes = {"corruption": ["clean", "fog"], "ridge_lambda": [1]}
    found = labels(Design(axes=axes, design="each", seeds=[1]))
    assert [(e["corruption"], e["severity"], e["ridge_lambda"]) for e in found] == [
        ("clean", 0, 0.05), ("fog", 3, 0.05), ("clean", 0, 1),
    ]  # fmt: skip


def test_an_axis_goes_before_what_the_pool_sets() -> None:
    whole = config()
    whole.modelpool.featcal = {"compare": {"post_merging_methods": {"featcal": {"mix_alpha": 1}}}}
    present, moved = Design(axes={"mix_alpha": [0]}, design="each", seeds=[1]).points(whole)
    assert (present.labels["mix_alpha"], moved.labels["mix_alpha"]) == (1, 0)
    suite = moved.changed(whole).modelpool.featcal.compare
    assert suite.post_merging_methods.featcal.mix_alpha == 0


def test_points_have_folders_of_their_own() -> None:
    subsets = ["+".join(f"long_task_name_{n}" for n in range(14) if n != out) for out in range(14)]
    texts = [*subsets, "a/b", "a_b"]
    points = [Point(labels={"of": t}, seed=s) for t in texts for s in (1, 2)]
    assert len({point.folder for point in points}) == len(points)


def test_reports_of_other_pools_have_another_name() -> None:
    settings = Point(labels={"n": 8}, changes={"method.samples_per_task": 8}, seed=1)
    assert settings.pool_name("clip-vit-base-patch32_TA8") == "clip-vit-base-patch32_TA8"
    fewer = Point(labels={"tasks": 2, "subset": "a+b"}, changes={"modelpool.models": {}}, seed=1)
    assert fewer.pool_name("clip") == "clip (tasks=2, subset=a+b)"


def test_a_sample_of_subsets_is_the_same_each_time() -> None:
    design = Design(axes={"tasks": [2, 3]}, seeds=[1])
    found = labels(design, subsets=3)
    assert found == labels(design, subsets=3)
    assert [entry["tasks"] for entry in found] == [2, 2, 2, 3, 3, 3]
    assert len({entry["subset"] for entry in found}) == 6


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"axes": {"sample_per_task": [8]}}, r"sample_per_task is no axis.*'samples_per_task'"),
        ({"axes": {"samples_per_task": [8, 0]}}, r"samples_per_task must be an integer >= 1"),
        ({"axes": {"seed": [1, 2]}}, r"with each seed of method.seeds=\[1, 2\]"),
        ({"axes": {"modules": [["a"], ["b"]]}}, r"\['a'\] needs a label"),
        ({"axes": {"steps": [0]}}, r"method.steps must be an integer >= 1, got 0"),
        ({"axes": {"samples_per_task": 8}}, r"must be a list of values"),
        ({"axes": {"samples_per_task": []}}, r"must be a list of values"),
        ({"axes": [8]}, r"method.axes must be a mapping of names to values"),
        ({"axes": {"own": {"x": 3}}}, r"method.axes.own.x must map dotted keys"),
        ({"axes": {"tasks": [1]}}, r"method.axes.tasks must be integers >= 2, got 1"),
        ({"axes": {"tasks": [9]}}, r"method.axes.tasks=\[9\]: the pool has 4 tasks"),
        ({"axes": {"mix_alpha": [0]}, "pairs": [["mix_alpha", "rho"]]}, r"'rho' is no axis"),
        ({"axes": {"mix_alpha": [0]}, "pairs": ["mix_alpha"]}, r"pairs must be a list of pairs"),
        ({"axes": {}, "seeds": []}, r"method.seeds must be a list of at least one"),
        ({"axes": {}, "seeds": 42}, r"method.seeds must be a list of at least one"),
        ({"axes": {}, "seeds": [-1]}, r"method.seeds must be a list of at least one integer >= 0"),
        ({"axes": {}, "design": "grid"}, r"method.design must be one of product, each, got 'grid'"),
        ({"axes": {"tasks": [2]}, "design": "each"}, r"the axis tasks has no present value"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Design(**{"seeds": [1], **keys}).points(config())
    assert "\n" not in str(caught.value)


def test_a_study_of_tasks_needs_two_experts() -> None:
    alone = config()
    alone.modelpool.models = {"_pretrained_": "x", "a": "y"}
    with pytest.raises(ValueError, match=r"needs a model pool with two experts or more.* has a"):
        Design(axes={"tasks": [2]}, seeds=[1]).points(alone)


def test_numbers_of_subsets_are_checked() -> None:
    with pytest.raises(ValueError, match=r"method.subsets must be null or an integer >= 1"):
        Design(subsets=0)


def test_every_variant_of_the_ablation_is_feat_cal_plus_but_for_its_part() -> None:
    config = Path(__file__).resolve().parents[2] / "config"
    plus = yaml.safe_load((config / "featcal_settings/plus.yaml").read_text(encoding="utf-8"))
    page = yaml.safe_load((config / "method/study/ablation.yaml").read_text(encoding="utf-8"))
    draw = {"_target_", "samples_per_task", "calibration_split", "seed"}
    changed = {}
    for name, settings in page["post_merging_methods"].items():
        if name.startswith("plus:"):
            assert draw < set(settings)
            keys = {*plus, *settings} - draw
            changed[name] = {key for key in keys if plus.get(key) != settings.get(key)}
    assert changed == {
        "plus:no_module_order": {"rule"},
        "plus:no_rows": {"rule"},
        "plus:no_drift_weights": {"task_weights"},
        "plus:no_copies": {"augment"},
    }
