"""Points of a study: the config at each of them, and axes that are refused."""

import itertools
from typing import Any

import pytest
from comparison_parts import MERGERS, FakeProgram
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_featcal.fusionbench import plain
from fusion_bench_featcal.lab.compare import StudyAlgorithm
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.tasks import corrupted

TASKS = ("mini_latin", "mini_greek")
FOUR = ("a", "b", "c", "d")
LOAD = "fusion_bench_featcal.suites.image.load_split"
FEATCAL = {
    "_target_": "fusion_bench_featcal.lab.compare.FeatCal",
    "samples_per_task": "${method.samples_per_task}",
    "mix_alpha": 0.2,
}


def config(tasks: Any = FOUR, modelpool: Any = None, **method: Any) -> Any:
    """A program's config with data for calibration and evaluation."""
    splits = {
        f"{split}_datasets": {t: {"_target_": LOAD, "task": t, "split": split} for t in tasks}
        for split in ("train", "test")
    }
    models = {"_pretrained_": "base", **dict.fromkeys(tasks, "expert")}
    chosen = {"samples_per_task": 256, "upstream_mergers": MERGERS, "seeds": [1], **method}
    return OmegaConf.create({
        "method": {"post_merging_methods": {"featcal": FEATCAL}, **chosen},
        "modelpool": {"models": models, **splits, **(modelpool or {})},
        "taskpool": {"test_datasets": splits["test_datasets"], "tasks": list(tasks)},
    })  # fmt: skip


def points(axes: Any, whole: Any = None, **method: Any) -> list[Any]:
    """Planned points of a study, with their configs."""
    whole = config() if whole is None else whole
    OmegaConf.update(whole, "method", {"axes": axes, **method}, force_add=True)
    before = plain(whole)
    keys: Any = OmegaConf.to_container(whole.method)
    algorithm: Any = StudyAlgorithm(study="x", **keys)
    algorithm._program = FakeProgram(None)
    algorithm._program.config = whole
    planned = algorithm.planned(False)
    assert plain(whole) == before
    return planned


def values_of(planned: list[Any]) -> list[tuple[Any, ...]]:
    return [tuple(entry.point.labels.values()) for entry in planned]


def test_a_product_has_every_combination_with_every_seed() -> None:
    planned = points({"samples_per_task": [8, 64], "ridge_lambda": [0.1, 1, 10]}, seeds=[1, 2])
    reached = []
    for entry in planned:
        method = entry.config.method
        featcal = method.post_merging_methods.featcal
        reached.append((featcal.samples_per_task, featcal.ridge_lambda, method.seed))
    assert reached == [*itertools.product((8, 64), (0.1, 1, 10), (1, 2))]
    assert values_of(planned) == [key[:2] for key in reached]


KINDS = {"one": {"method.steps": 1}, "two": {"method.steps": 2}}
EACH: list[tuple[dict[str, Any], Any, list[tuple[Any, ...]]]] = [
    (
        {"ridge_lambda": [0.05, 1], "mix_alpha": [0, 0.2], "anchor_rho": [2.0]},
        [["ridge_lambda", "mix_alpha"]],
        [(0.05, 0.2, 2.0), (1, 0.2, 2.0), (0.05, 0, 2.0), (1, 0, 2.0)],
    ),
    ({"kind": KINDS, "ridge_lambda": [1]}, (), [("one", 0.05), ("two", 0.05), ("one", 1)]),
]


@pytest.mark.parametrize(("axes", "pairs", "expected"), EACH)
def test_each_axis_moves_by_itself_around_the_present_settings(
    axes: Any, pairs: Any, expected: Any
) -> None:
    planned = points(axes, design="each", pairs=pairs)
    assert values_of(planned) == expected
    if "kind" in axes:
        assert [entry.config.method.steps for entry in planned] == [1, 2, 1]


def test_labels_change_any_key() -> None:
    other = {"modelpool.train_datasets": {"a": {"task": "z"}}}
    plain_point, changed = points({"data": {"plain": {}, "other": other}})
    assert plain_point.config.modelpool == config().modelpool
    assert changed.config.modelpool.train_datasets == {"a": {"task": "z"}}
    assert plain_point.point.pool_name("clip") == "clip"
    assert changed.point.pool_name("clip") == "clip (data=other)"


def test_points_have_folders_of_their_own() -> None:
    subsets = ["+".join(f"long_task_name_{n}" for n in range(9) if n != out) for out in range(9)]
    planned = points({"of": {text: {} for text in [*subsets, "a/b", "a_b"]}}, seeds=[1])
    assert len({entry.point.folder for entry in planned}) == len(planned) == 11


def test_subsets_of_tasks_are_in_both_pools() -> None:
    planned = points({"tasks": [3, 4, 5]})
    assert len(planned) == 4 + 1  # the pool has no five tasks
    for entry in planned:
        chosen, pool = entry.point.labels["subset"].split("+"), entry.config.modelpool
        assert list(pool.models) == ["_pretrained_", *chosen]
        assert list(pool.train_datasets) == list(entry.config.taskpool.test_datasets) == chosen
        assert entry.config.taskpool.tasks == chosen
        assert entry.point.labels["tasks"] == len(chosen)
    sample = values_of(points({"tasks": [2]}, subsets=3))
    assert sample == values_of(points({"tasks": [2]}, subsets=3))
    assert len(set(sample)) == 3


# ---- calibration data


def test_corrupted_images_are_calibrated_on_and_clean_ones_evaluated() -> None:
    kinds = {"kinds": ["clean", "gaussian_noise"], "severities": [1, 4]}
    planned = points({"corruption": kinds}, config(TASKS))
    assert values_of(planned) == [("clean", 0), ("gaussian_noise", 1), ("gaussian_noise", 4)]
    assert planned[0].point.changes == {}
    point = planned[-1].config
    assert plain(point.taskpool) == plain(config(TASKS).taskpool)
    for split, task in itertools.product(("train", "test"), TASKS):
        clean = image.load_split(task, split)
        rows = instantiate(point.modelpool[f"{split}_datasets"][task])
        expected = corrupted(clean, "gaussian_noise", 4, task=task)[5]
        assert rows[5]["image"].tobytes() == expected["image"].tobytes()
        assert rows[5]["image"].tobytes() != clean[5]["image"].tobytes()


def test_sources_name_the_data_of_other_tasks() -> None:
    data = plain(config(TASKS).modelpool.train_datasets)
    planned = {
        entry.point.labels["source"]: plain(entry.config.modelpool.train_datasets)
        for entry in points({"source": ["own", "others", "each", "mixed", "noise"]}, config(TASKS))
    }
    assert list(planned) == ["own", "others", *TASKS, "mixed", "noise"]
    assert len(instantiate(OmegaConf.create(planned["noise"]["mini_latin"]))) == 1000
    assert planned["own"] == data
    assert planned["mini_greek"] == dict.fromkeys(TASKS, data["mini_greek"])
    assert [planned["others"][t]["data"] for t in TASKS] == [[data[t]] for t in reversed(TASKS)]
    rows = instantiate(OmegaConf.create(planned["mixed"]["mini_latin"]))
    first = [image.load_split(task, "train")[0]["image"].tobytes() for task in TASKS]
    assert [rows[index]["image"].tobytes() for index in (0, 1)] == first


# ---- refused

ONE = {"train_datasets": {"mini_latin": {"_target_": LOAD}}}
REFUSED: list[tuple[dict[str, Any], Any, str]] = [
    ({"axes": {"sample_per_task": [8]}}, config(), r"sample_per_task is no axis.*'samples_per_ta"),
    ({"axes": {"modules": [["a"], ["b"]]}}, config(), r"\['a'\] needs a label"),
    ({"axes": {"tasks": [9]}}, config(), r"method.axes.tasks=\[9\]: the pool has 4 tasks"),
    ({"axes": {"tasks": [2]}, "design": "each"}, config(), r"axis tasks has no present value to"),
    ({"axes": {"corruption": ["fog"]}}, config(TASKS, ONE), r"has none for mini_greek: set modelp"),
    ({"axes": {"source": ["mini_latn"]}}, config(TASKS), r"source .* \(nearest: 'mini_latin'\)"),
]


@pytest.mark.parametrize(("keys", "whole", "message"), REFUSED)
def test_axes_that_cannot_be_are_refused(keys: dict[str, Any], whole: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        points(whole=whole, **keys)
    assert "\n" not in str(caught.value)
