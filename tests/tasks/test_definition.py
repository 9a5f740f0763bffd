"""What may stand under `tasks:`, and what is refused with the task, the key and the value."""

import json

import datasets
import pytest
from omegaconf import OmegaConf
from tiny_images import SHAPES, picture

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import load_images
from fusion_bench_featcal.tasks.definition import TaskDefinition, load_task, parse_tasks


def only(**keys) -> TaskDefinition:
    return parse_tasks({"shapes": keys})["shapes"]


def test_every_key_is_read():
    yaml = """
    shapes:
      data: some/folder
      split: test
      image_column: img
      label_column: kind
      classnames: [circle, 2, 3.5]
      templates: ["a {} in {}.", "{}"]
    """
    task = parse_tasks(OmegaConf.create(yaml))["shapes"]
    assert (task.data, task.split, task.image_column) == ("some/folder", "test", "img")
    assert (task.label_column, task.classnames) == ("kind", ("circle", "2", "3.5"))
    assert [template("{x}") for template in task.templates or ()] == ["a {x} in {x}.", "{x}"]
    assert [t("cat") for t in only(data="x", templates="a {}").templates or ()] == ["a cat"]
    assert parse_tasks(None) == {}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["shapes"], "taskpool.tasks must be a mapping from task names"),
        ({"shapes": "folder"}, "taskpool.tasks.shapes must be a mapping with a key data"),
        ({"shapes": {"clasnames": []}}, r"shapes: unknown key 'clasnames' \(nearest: 'classnames'"),
        (
            {"shapes": {"data": 3}},
            "shapes.data must be null or a path, a hub id or a mapping with _target_",
        ),
        ({"shapes": {"data": {"path": "x"}}}, "shapes.data must be null or a path"),
        ({"shapes": {"split": 1}}, "shapes.split must be null or a text, got 1"),
        ({"shapes": {"image_column": None}}, "shapes.image_column must be a text, got None"),
        ({"shapes": {"classnames_by": "x"}}, "classnames_by must be one of name, order, got 'x'"),
        (
            {"shapes": {"classnames": "cat, dog"}},
            "shapes.classnames must be null or a list of different names",
        ),
        (
            {"shapes": {"classnames": []}},
            "shapes.classnames must be null or a list of different names",
        ),
        ({"shapes": {"classnames": [True, "maybe"]}}, "yes, no, on and off in quotes.*True"),
        ({"shapes": {"classnames": ["a", "b", "a"]}}, "a list of different names"),
        ({"shapes": {"templates": []}}, "shapes.templates must be null or prompts"),
        (
            {"shapes": {"templates": ["a photo"]}},
            r"prompts with \{\} for the class name.*'a photo'",
        ),
    ],
)
def test_unfit_values_are_named(tasks, message):
    with pytest.raises(ValueError, match=message):
        parse_tasks(tasks)


def test_data_of_a_target_with_other_columns(shapes):
    target = {"_target_": "datasets.Dataset.from_dict", "mapping": {"img": [], "kind": []}}
    rows = [{"img": str(file), "kind": file.parent.name} for file in sorted(shapes.rglob("*.png"))]
    target["mapping"] = datasets.Dataset.from_list(rows).to_dict()
    task = only(
        data=target, image_column="img", label_column="kind", classnames=["star", *SHAPES[:2]]
    )
    items = load_task("shapes", task)
    assert [items[index]["label"] for index in (0, 4, 8)] == [1, 2, 0]
    assert items[0]["image"].tobytes() == picture(0).tobytes()


@pytest.mark.parametrize("as_folder", [True, False])
def test_order_of_fusion_benchs_class_names_is_no_order_of_folders(shapes, as_folder):
    known = ["a ring", "a box", "a sun"]
    labels = datasets.ClassLabel(names=list(SHAPES))
    features = datasets.Features({"image": datasets.Image(), "label": labels})
    rows = [{"image": picture(n), "label": n} for n in range(3)]
    table = datasets.Dataset.from_list(rows, features=features)
    assert [item["label"] for item in load_task("shapes", only(), known, table)] == [0, 1, 2]
    with pytest.raises(ValueError, match="No class name: 'circle'"):
        if as_folder:
            load_task("shapes", only(data=str(shapes)), known)
        else:
            load_task("shapes", only(), known, load_images(str(shapes)))


def test_target_that_gives_several_splits_needs_one(shapes):
    build = "fusion_bench_featcal.tasks.load_images"
    splits = {"_target_": "builtins.dict", "test": {"_target_": build, "path": str(shapes)}}
    assert len(load_task("shapes", only(data=splits, split="test"))) == 12
    with pytest.raises(CalibrationError, match="a mapping of test: set its _target_, or the split"):
        load_task("shapes", only(data=splits))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"data": {"_target_": "fusion_bench_featcal.tasks.load_images", "path": "SHAPES"},
             "split": "test"},
            r"split 'test' has no effect where data\._target_",
        ),
        ({"data": "SHAPES/circle"}, r"circle' has no labels"),
        ({"data": "SHAPES/table.csv"}, "the data has no class names: set classnames"),
        (
            {"data": "somebody/shapes", "split": "test", "classnames": ["a"]},
            r"data 'somebody/shapes', split 'test'.*HF_HUB_OFFLINE is set",
        ),
    ],
)  # fmt: skip
def test_data_that_cannot_be_evaluated_are_refused_by_task(shapes, keys, message):
    (shapes / "table.csv").write_text("image,label\ncircle/00.png,0\n")
    keys = json.loads(json.dumps(keys).replace("SHAPES", str(shapes)))
    with pytest.raises((ValueError, CalibrationError), match=rf"tasks\.shapes: .*{message}"):
        load_task("shapes", only(**keys))
