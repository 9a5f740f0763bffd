"""What may stand under `tasks:`, and what is refused with the task, the key and the value."""

import datasets
import pytest
from omegaconf import OmegaConf
from tiny_images import SHAPES, picture

from fusion_bench_featcal.settings import CalibrationError
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


def test_one_template_needs_no_list():
    assert [t("cat") for t in only(data="x", templates="a {}").templates or ()] == ["a cat"]


def test_no_tasks():
    assert parse_tasks(None) == {}


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["shapes"], "taskpool.tasks must be a mapping from task names"),
        ({"shapes": "folder"}, "taskpool.tasks.shapes must be a mapping with a key data"),
        ({"shapes": {"clasnames": []}}, r"shapes: unknown key 'clasnames' \(nearest: 'classnames'"),
        (
            {"shapes": {"data": 3}},
            "shapes.data must be a path, a hub id or a mapping with _target_",
        ),
        ({"shapes": {"data": {"path": "x"}}}, "shapes.data must be a path"),
        ({"shapes": {"split": 1}}, "shapes.split must be a text, got 1"),
        ({"shapes": {"image_column": None}}, "shapes.image_column must be a text, got None"),
        ({"shapes": {"classnames": "cat, dog"}}, "shapes.classnames must be a list of names"),
        ({"shapes": {"classnames": []}}, "shapes.classnames must be a list of names"),
        ({"shapes": {"classnames": [True, "maybe"]}}, "True is no name. Write it in quotes"),
        ({"shapes": {"classnames": ["a", "b", "a"]}}, "'a' stands there twice"),
        ({"shapes": {"templates": []}}, "shapes.templates must be a list of prompts"),
        ({"shapes": {"templates": ["a photo"]}}, r"'a photo' has no \{\} for the class name"),
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
    with pytest.raises(ValueError, match="share no name"):
        if as_folder:
            load_task("shapes", only(data=str(shapes)), known)
        else:
            load_task("shapes", only(), known, load_images(str(shapes)))


def test_target_that_gives_several_splits_needs_one(shapes):
    build = "fusion_bench_featcal.tasks.load_images"
    splits = {"_target_": "builtins.dict", "test": {"_target_": build, "path": str(shapes)}}
    assert len(load_task("shapes", only(data=splits, split="test"))) == 12
    with pytest.raises(ValueError, match="the data has splits test; split is None"):
        load_task("shapes", only(data=splits))


def test_split_beside_a_target_without_splits(shapes):
    target = {"_target_": "fusion_bench_featcal.tasks.load_images", "path": str(shapes)}
    with pytest.raises(ValueError, match=r"split 'test' has no effect where data\._target_"):
        load_task("shapes", only(data=target, split="test"))


def test_unlabeled_data_cannot_be_evaluated(shapes):
    with pytest.raises(CalibrationError, match=r"tasks\.shapes: .*circle' has no labels"):
        load_task("shapes", only(data=str(shapes / "circle")))


def test_integers_need_class_names(shapes):
    (shapes / "table.csv").write_text("image,label\ncircle/00.png,0\n")
    with pytest.raises(
        ValueError, match=r"tasks\.shapes: the data names no classes: set classnames"
    ):
        load_task("shapes", only(data=str(shapes / "table.csv")))


def test_offline_hub_id_names_task_id_and_setting():
    expected = r"tasks\.shapes: data 'somebody/shapes', split 'test'.*HF_HUB_OFFLINE is set"
    with pytest.raises(CalibrationError, match=expected):
        load_task("shapes", only(data="somebody/shapes", split="test", classnames=["a"]))
