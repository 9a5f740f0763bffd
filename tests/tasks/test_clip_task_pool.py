"""The task pool: FusionBench's accuracies, for tasks that YAML alone defines."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fusion_bench_featcal.pools  # noqa: F401  adapts FusionBench

# isort: split
import datasets
import lightning
import pytest
from calibrations import gamma
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory, get_classnames_and_templates
from omegaconf import OmegaConf
from tiny_images import SHAPES, picture, write_class_folders, write_clip
from tiny_models import scatter
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import ClipTaskPool, load_images

# Two float32 cosines, times the logits' scale of e^2.66. A patch's 3 * 14 * 14 products are the
# longest sum of the model.
ROUNDING = 2 * 14.3 * gamma(3 * 14 * 14)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A CLIP, and two tasks as class folders."""
    folder = write_clip(tmp_path_factory.mktemp("clip"), seed=1)
    write_class_folders(folder / "shapes")
    write_class_folders(folder / "larger", ("thing", *SHAPES), per_class=7, seed=1)
    return folder


@pytest.fixture
def two_tasks(folder) -> dict[str, Any]:
    return {
        "shapes": {"data": str(folder / "shapes"), "templates": ["a drawing of a {} ."]},
        "larger": {"data": str(folder / "larger"), "templates": ["a {} .", "a photo of a {} ."]},
    }


@pytest.fixture
def make_pool(folder, monkeypatch):
    """Makes a task pool on the CPU from its keys. Class names that it registers do not stay."""
    table = dict(CLIPTemplateFactory._dataset_mapping)
    monkeypatch.setattr(CLIPTemplateFactory, "_dataset_mapping", table)

    def make(**keys: Any) -> Any:
        keys = {"base_model": str(folder), "dataloader_kwargs": {"batch_size": 5}} | keys
        pool: Any = ClipTaskPool(**keys)
        pool.fabric = lightning.Fabric(accelerator="cpu", devices=1)
        return pool

    return make


@pytest.fixture
def model(folder) -> Any:
    """A vision model unlike the one of the pool's heads."""
    return scatter(CLIPVisionModel.from_pretrained(folder), 7, 0.3)


def test_same_accuracies_as_fusion_benchs_own_pool(make_pool, two_tasks, folder, model):
    ours = make_pool(tasks=two_tasks)
    items = {name: load_images(task["data"]) for name, task in two_tasks.items()}
    report = ours.evaluate(model, name="model")
    # losses are means over items, whatever the batch size
    single = make_pool(tasks=two_tasks, dataloader_kwargs={"batch_size": 1}).evaluate(model)
    reference = CLIPVisionModelTaskPool(
        items,  # type: ignore[arg-type]
        processor=CLIPProcessor.from_pretrained(folder),
        clip_model=CLIPModel.from_pretrained(folder),
        dataloader_kwargs={"batch_size": 3},  # type: ignore[arg-type]
    )
    reference.fabric = ours.fabric
    expected = reference.evaluate(model)
    assert list(ours.item_correct) == list(two_tasks)
    for task, correct in ours.item_correct.items():
        accuracy = report[task]["accuracy"]
        assert 0 < accuracy < 1 and correct.double().mean().item() == accuracy
        assert accuracy == pytest.approx(expected[task]["accuracy"], abs=1e-6)
        assert report[task]["loss"] == pytest.approx(single[task]["loss"], abs=ROUNDING)
    assert report["average"]["accuracy"] == pytest.approx(expected["average"]["accuracy"])
    assert report["model_info"] == expected["model_info"] | {"name": "model"}


def table(names, columns=("image", "label")) -> datasets.Dataset:
    """One picture of each class."""
    features = datasets.Features(
        {columns[0]: datasets.Image(), columns[1]: datasets.ClassLabel(names=list(names))}
    )
    rows = [{columns[0]: picture(n), columns[1]: n} for n in range(len(names))]
    return datasets.Dataset.from_list(rows, features=features)


RENAMED = ["star", "circle", "square"]
PER_SHAPE = [name for name in SHAPES for _ in range(4)]
IN_COLUMNS = {"_target_": f"{__name__}.table", "names": list(SHAPES), "columns": ["img", "kind"]}
# Keys of a task, and the classes of its items.
TASKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({"data": "FOLDER/shapes"}, PER_SHAPE),
    "classnames": ({"data": "FOLDER/shapes", "classnames": RENAMED}, PER_SHAPE),
    "columns": ({"data": IN_COLUMNS, "image_column": "img", "label_column": "kind",
                 "classnames": [1, 2.5, "x"]}, ["1", "2.5", "x"]),
    "split": ({"data": "FOLDER", "split": "shapes", "templates": "a {x} {}"}, PER_SHAPE),
}  # fmt: skip


def test_every_key_of_a_task_is_used(make_pool, folder, model):
    keys = json.dumps({name: task for name, (task, _) in TASKS.items()})
    pool = make_pool(tasks=OmegaConf.create(keys.replace("FOLDER", str(folder))))
    report = pool.evaluate(model)
    for name, (_, classes) in TASKS.items():
        opened = pool._open_tasks[name]
        labels = [opened.items.read(number)[1] for number in range(len(opened.items))]
        assert [opened.classnames[label] for label in labels] == classes
    # the order of the classes is no matter of the pictures
    assert report["classnames"] == pytest.approx(report["plain"], abs=ROUNDING)
    names, templates = get_classnames_and_templates("split")
    assert (names, templates[0](names[0])) == (list(SHAPES), "a {x} circle")


CAT = {"image": picture(0), "label": 0}


def test_a_task_without_data_has_the_model_pools(make_pool, folder, model):
    own, shared = str(folder / "shapes"), str(folder / "larger")
    program = SimpleNamespace(
        modelpool=SimpleNamespace(_test_datasets={"own": shared, "shared": shared, "rest": own})
    )
    templates = {"templates": ["a {} ."]}
    pool = make_pool(tasks={"shared": templates, "own": {"data": own, **templates}})
    pool._program = program
    report = pool.evaluate(model)
    tasks = {"shared": {"data": shared, **templates}, "own": {"data": own, **templates}}
    expected = make_pool(tasks=tasks).evaluate(model)
    assert report == expected and list(report)[1:] == ["shared", "own", "average"]
    every = make_pool()
    every._program = program
    assert list(every.evaluate(model))[1:] == ["own", "shared", "rest", "average"]


def pool_of(*items: Any) -> dict[str, Any]:
    """Keys of a pool with items in memory."""
    return {"test_datasets": {"x": [*items]}, "tasks": {"x": {"classnames": ["cat", "dog"]}}}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # refused before anything is loaded
        ({"tasks": {"x": {"data": "FOLDER/shapes"}}, "test_datasets": {"x": [CAT]}},
         "task 'x' needs its data once: set either"),
        ({"task": {}}, r"taskpool\.task is unknown \(nearest: 'tasks'\)"),
        ({"tasks": {"x": {"data": "./nowhere"}}}, r"x\.data=\./nowhere: there is no such file"),
        ({"tasks": {"x": {"clasnames": []}}}, r"x\.clasnames is unknown \(nearest: 'classnames'"),
        ({"tasks": {"x": {"templates": ["a photo"]}}}, r"prompts with \{\} for the class name"),
        # refused when they are evaluated
        ({"tasks": {"one": None}}, r"'one' has no test data: set taskpool\.tasks\.one\.data or "
         r"modelpool\.test_datasets\.one"),
        ({}, r"no tasks: name their data under taskpool\.test_datasets or modelpool\.test_d"),
        (pool_of(CAT, CAT | {"label": 2}), r"test_datasets\.x, example 1: label 2 is not one"),
        (pool_of({"image": picture(0)}), r"task 'x'.*example 0 has no label"),
        (pool_of(), r"task 'x' has no test examples"),
    ],
)  # fmt: skip
def test_keys_and_items_that_cannot_be_used_are_named(make_pool, model, keys, message):
    with pytest.raises((ValueError, CalibrationError), match=message):
        make_pool(**keys).evaluate(model)


@pytest.mark.parametrize(("item", "message"), [
    ({"image": picture(0)}, r"task 'x'.*example 0 has no label"),
    ({"image": b"no image", "label": 0}, r"task 'x'.*example 0: .* cannot be read as an image"),
    (CAT | {"label": 2}, r"test_datasets\.x, example 0: label 2 is not one of the 2 classes"),
])  # fmt: skip
def test_a_first_item_is_read_before_a_model_is_loaded(make_pool, item, message):
    with pytest.raises(CalibrationError, match=message):
        _ = make_pool(**pool_of(item), clip_model="nowhere").opened
