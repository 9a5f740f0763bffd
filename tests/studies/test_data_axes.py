"""Points that change calibration data: which datasets they name, and what they leave as it is."""

from pathlib import Path
from typing import Any

import pytest
from fusion_bench.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.lab.compare.axes import Design, make_axis
from fusion_bench_featcal.lab.compare.points import Option
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.tasks import corrupted

TASKS = ("mini_latin", "mini_greek")
LOAD = "fusion_bench_featcal.suites.image.load_split"


def program(**changes: Any) -> DictConfig:
    """A program's config with two of the bundled tasks, in the pools and for evaluation."""
    splits = {
        f"{split}_datasets": {t: {"_target_": LOAD, "task": t, "split": split} for t in TASKS}
        for split in ("train", "test")
    }
    models = {"_pretrained_": "base", **dict.fromkeys(TASKS, "expert")}
    pools = {
        "modelpool": {"models": models, **splits},
        "taskpool": {"test_datasets": splits["test_datasets"]},
        "method": {"calibration_split": "train", "seed": 42},
    }
    config = OmegaConf.create(pools)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, merge=False)
    return config


def options(axis: str, values: Any, config: DictConfig | None = None) -> list[Option]:
    return make_axis(axis, values, config or program()).options


def test_clean_comes_once_and_changes_nothing() -> None:
    kinds = ["clean", "fog", "motion_blur"]
    made = options("corruption", {"kinds": kinds, "severities": [1, 5]})
    labels = [tuple(option.labels.values()) for option in made]
    assert labels == [("clean", 0), ("fog", 1), ("fog", 5), ("motion_blur", 1), ("motion_blur", 5)]
    assert made[0].changes == {}
    assert [option.labels["severity"] for option in options("corruption", kinds)] == [0, 3, 3]


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_points_pool_loads_corrupted_images_and_is_evaluated_on_clean_ones(split: str) -> None:
    config = program()
    axes = {"corruption": {"kinds": ["gaussian_noise"], "severities": [4]}}
    (point,) = Design(axes=axes, seeds=[1]).points(config)
    changed = point.changed(config)
    assert plain(changed.taskpool) == plain(config.taskpool)
    for task in TASKS:
        clean = image.load_split(task, split)
        rows = instantiate(changed.modelpool[f"{split}_datasets"][task])
        expected = corrupted(clean, "gaussian_noise", 4, task=task)[5]
        assert rows[5]["image"].tobytes() == expected["image"].tobytes()
        assert rows[5]["image"].tobytes() != clean[5]["image"].tobytes()
    assert plain(config) == plain(program())


def data_of(option: Option) -> Any:
    return option.changes["modelpool.train_datasets"]


def test_sources_name_the_data_of_other_tasks() -> None:
    config = program()
    entries: Any = plain(config.modelpool.train_datasets)
    made = {str(o.labels["source"]): o for o in options("source", ["own", "others", "each"])}
    assert list(made) == ["own", "others", *TASKS]
    assert made["own"].changes == {}
    assert data_of(made["mini_greek"]) == dict.fromkeys(TASKS, entries["mini_greek"])
    others = data_of(made["others"])
    assert [others[task]["data"] for task in TASKS] == [[entries[t]] for t in reversed(TASKS)]
    (mixed,) = options("source", ["mixed"])
    rows = instantiate(OmegaConf.create(data_of(mixed)["mini_latin"]))
    first = [image.load_split(task, "train")[0]["image"].tobytes() for task in TASKS]
    assert [rows[place]["image"].tobytes() for place in (0, 1)] == first


def test_a_pool_may_have_sources_of_its_own() -> None:
    noise = {"_target_": "fusion_bench_featcal.tasks.NoiseImages", "size": 28}
    config = program(modelpool__featcal={"sources": {"noise": noise, "fonts": {"_target_": "x"}}})
    design = Design(axes={"source": ["own", "noise", "sources"]}, seeds=[1])
    points = {str(point.labels["source"]): point.changes for point in design.points(config)}
    assert list(points) == ["own", "noise", "fonts"]  # each of them once
    assert points["noise"] == {"modelpool.train_datasets": dict.fromkeys(TASKS, noise)}
    (plain_noise,) = options("source", ["noise"])
    assert len(instantiate(OmegaConf.create(data_of(plain_noise)["mini_latin"]))) == 1000


def test_hub_ids_and_folders_become_configs(tmp_path: Path) -> None:
    entries = {"mini_latin": "tanganke/dtd", "mini_greek": str(tmp_path)}
    config = program(modelpool__train_datasets=entries)
    (fog,) = options("corruption", ["fog"], config)
    data = {task: entry["data"] for task, entry in data_of(fog).items()}
    hub = {"_target_": "datasets.load_dataset", "path": "tanganke/dtd", "split": "train"}
    folder = {"_target_": "fusion_bench_featcal.tasks.load_images", "path": str(tmp_path)}
    assert data == {"mini_latin": hub, "mini_greek": folder}


@pytest.mark.parametrize(
    ("axis", "values", "message"),
    [
        ("corruption", ["frog"], r"axes\.corruption.*must be one of gaussian_noise.*\(nearest: "),
        ("corruption", {"severities": [0]}, r"corruption\.severities must be .* 1 to 5, got 0"),
        ("corruption", {"severities": [6]}, r"corruption\.severities must be .* 1 to 5, got 6"),
        (
            "corruption",
            {"kind": ["fog"]},
            r"axes\.corruption: unknown key 'kind' ",
        ),
        ("corruption", {"kinds": "fog"}, r"corruption\.kinds must be a list, got 'fog'"),
        ("corruption", {"severities": 3}, r"corruption\.severities must be a list, got 3"),
        ("corruption", [["fog"]], r"must be one of gaussian_noise.*, got \['fog'\]"),
        ("source", ["mini_latn"], r"axes\.source must name .* \(nearest: 'mini_latin'\)"),
        ("source", [{"path": "x"}], r"axes\.source must name .*sources\.NAME\), got {'path'"),
        ("source", {"mine": "own"}, r"axes\.source must be a list of sources, got {'mine'"),
    ],
)
def test_values_that_do_not_exist_are_refused(axis: str, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        options(axis, values)
    assert "\n" not in str(caught.value)


def test_pools_that_lack_data_are_refused() -> None:
    lacking = program(modelpool__train_datasets={"mini_latin": {"_target_": LOAD}})
    for axis, values in (("corruption", ["fog"]), ("source", ["mixed"])):
        with pytest.raises(ValueError, match="the pool has none for mini_greek: set modelpool"):
            options(axis, values, lacking)
    alone = program(
        modelpool__models={"mini_latin": "expert"},
        modelpool__train_datasets={"mini_latin": {"_target_": LOAD}},
    )
    with pytest.raises(ValueError, match="others needs a second task, and there is mini_latin"):
        options("source", ["others"], alone)
