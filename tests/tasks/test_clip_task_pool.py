"""The task pool: FusionBench's accuracies, item by item, for tasks that YAML alone defines."""

import json
from pathlib import Path
from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
import datasets
import lightning
import pytest
import torch
from calibrations import gamma
from fusion_bench.taskpool import CLIPVisionModelTaskPool
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory, get_classnames_and_templates
from fusion_bench.utils import cache_utils
from omegaconf import OmegaConf
from tiny_images import SHAPES, channels_first, picture, write_class_folders, write_clip
from tiny_models import scatter
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import ClipTaskPool, OpenClipTaskPool, clip_pool, load_images

LOAD = "fusion_bench_featcal.tasks.load_images"
DIGITS = [str(digit) for digit in range(10)]
REFUSALS = (ValueError, CalibrationError)


# Two float32 cosines, times the logits' scale of e^2.66. A patch's 3 * 14 * 14 products are the
# longest sum of the model.
ROUNDING = 2 * 14.3 * gamma(3 * 14 * 14)


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"), seed=1)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> Path:
    """Three classes of four pictures."""
    return write_class_folders(tmp_path_factory.mktemp("data") / "shapes")


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory, shapes) -> dict:
    names = ("thing", *SHAPES)
    larger = write_class_folders(tmp_path_factory.mktemp("larger"), names, per_class=7, seed=1)
    return {
        "shapes": {"data": str(shapes), "templates": ["a drawing of a {} ."]},
        "larger": {"data": str(larger), "templates": ["a {} .", "a photo of a {} ."]},
    }


@pytest.fixture(autouse=True)
def no_traces(tmp_path, monkeypatch):
    """Class names that a test registers, and heads that it stores, are gone after it."""
    table = dict(CLIPTemplateFactory._dataset_mapping)
    monkeypatch.setattr(CLIPTemplateFactory, "_dataset_mapping", table)
    monkeypatch.setattr(cache_utils, "DEFAULT_CACHE_DIR", tmp_path / "cache")


@pytest.fixture
def make_pool(clip_folder):
    """Makes a task pool on the CPU from its keys."""

    def make(kind: Any = ClipTaskPool, **keys: Any) -> Any:
        keys = {"base_model": str(clip_folder), "dataloader_kwargs": {"batch_size": 5}} | keys
        pool = kind(**keys)
        pool.fabric = lightning.Fabric(accelerator="cpu", devices=1)
        return pool

    return make


@pytest.fixture
def model(clip_folder) -> Any:
    """A vision model unlike the one of the pool's heads."""
    return scatter(CLIPVisionModel.from_pretrained(clip_folder), 7, 0.3)


def predictions(clip_folder, model, processor, items, task):
    """Zero-shot classes, written out."""
    clip = CLIPModel.from_pretrained(clip_folder).eval()
    classnames, templates = get_classnames_and_templates(task)
    with torch.no_grad():
        heads = []
        for name in classnames:
            text = processor(text=[t(name) for t in templates], return_tensors="pt", padding=True)
            prompts = clip.text_projection(clip.text_model(**text).pooler_output)
            heads.append(normalize(normalize(prompts, dim=-1).mean(dim=0), dim=0))
        pictures = [item["image"] for item in items]
        pixels = processor(images=pictures, return_tensors="pt")["pixel_values"]
        features = clip.visual_projection(model(pixels).pooler_output)
        return (normalize(features, dim=-1) @ torch.stack(heads).T).argmax(-1)


def test_same_accuracies_as_fusion_benchs_own_pool_item_by_item(
    make_pool, two_tasks, clip_folder, model
):
    ours, processor = make_pool(tasks=two_tasks), CLIPProcessor.from_pretrained(clip_folder)
    items = {name: load_images(task["data"]) for name, task in two_tasks.items()}
    report = ours.evaluate(model, name="model")
    reference = CLIPVisionModelTaskPool(
        items,  # type: ignore[arg-type]
        processor=processor,
        clip_model=CLIPModel.from_pretrained(clip_folder),
        dataloader_kwargs={"batch_size": 3},  # type: ignore[arg-type]
    )
    reference.fabric = ours.fabric
    expected = reference.evaluate(model)
    assert list(ours.item_correct) == list(two_tasks)
    for task, correct in ours.item_correct.items():
        accuracy = report[task]["accuracy"]
        assert 0 < accuracy < 1 and correct.double().mean().item() == accuracy
        assert accuracy == pytest.approx(expected[task]["accuracy"], abs=1e-6)
        labels = torch.tensor([item["label"] for item in items[task]])
        classes = predictions(clip_folder, model, processor, items[task], task)
        assert torch.equal(correct, classes == labels)
        names = items[task].classnames or []
        assert ours.item_classes[task] == [names[label] for label in labels]
    assert report["average"]["accuracy"] == pytest.approx(expected["average"]["accuracy"])
    assert report["model_info"] == expected["model_info"] | {"name": "model"}


def test_loss_is_a_mean_over_items_whatever_the_batch_size(make_pool, two_tasks, model):
    single, uneven = (
        make_pool(tasks=two_tasks, dataloader_kwargs=settings).evaluate(model)
        for settings in ({"batch_size": 1}, {"batch_size": 5, "num_workers": 1})
    )
    for task in two_tasks:
        assert single[task]["loss"] > 0
        assert uneven[task]["loss"] == pytest.approx(single[task]["loss"], abs=ROUNDING)


def test_pictures_of_small_tasks_are_processed_once(make_pool, two_tasks, model, monkeypatch):
    size = 4 * 3 * 28 * 28  # of the pixels of a picture
    for limit, processed in ((20 * size, 71), (50 * size, 42)):  # of 12 + 28 pictures, and looks
        monkeypatch.setattr(clip_pool, "KEPT_BYTES", limit)
        pictures = []
        processor = lambda image, p=pictures: p.append(image) or channels_first(image)  # noqa: E731
        pool = make_pool(tasks=two_tasks, data_processor=processor)
        assert pool.evaluate(model) == pool.evaluate(model)
        assert len(pictures) == processed


def table(names, columns=("image", "label")) -> datasets.Dataset:
    """One picture of each class."""
    features = datasets.Features(
        {columns[0]: datasets.Image(), columns[1]: datasets.ClassLabel(names=list(names))}
    )
    rows = [{columns[0]: picture(n), columns[1]: n} for n in range(len(names))]
    return datasets.Dataset.from_list(rows, features=features)


def per_shape(*names: str) -> list[str]:
    """Class names of four pictures each."""
    return [name for name in names for _ in range(4)]


RENAMED = ["star", "circle", "square"]
IN_COLUMNS = {"_target_": f"{__name__}.table", "names": list(SHAPES), "columns": ["img", "kind"]}
# Keys of a task, and the classes of its items.
TASKS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "plain": ({"data": "SHAPES"}, per_shape(*SHAPES)),
    "classnames": ({"data": "SHAPES", "classnames": RENAMED}, per_shape(*SHAPES)),
    "numbers": ({"data": IN_COLUMNS, "image_column": "img", "label_column": "kind",
                 "classnames": [1, 2.5, "x"]}, ["1", "2.5", "x"]),
    "columns": ({"data": IN_COLUMNS, "image_column": "img", "label_column": "kind",
                 "classnames": RENAMED}, list(SHAPES)),
    "split": ({"data": "SHAPES/..", "split": "shapes", "templates": "a {x} {}"},
              per_shape(*SHAPES)),
}  # fmt: skip


def test_every_key_of_a_task_is_used(make_pool, shapes, model):
    keys = json.dumps({name: task for name, (task, _) in TASKS.items()})
    pool = make_pool(tasks=OmegaConf.create(keys.replace("SHAPES", str(shapes))))
    report = pool.evaluate(model)
    assert pool.item_classes == {name: classes for name, (_, classes) in TASKS.items()}
    # the order of the classes is no matter of the pictures
    assert report["classnames"] == pytest.approx(report["plain"], abs=ROUNDING)
    names, templates = get_classnames_and_templates("split")
    assert (names, templates[0](names[0])) == (list(SHAPES), "a {x} circle")
    assert get_classnames_and_templates("columns")[1][0]("star") == "a photo of a star."


def test_class_names_of_fusion_bench_are_used_in_the_order_of_tables_alone(
    make_pool, tmp_path, model
):
    letters = write_class_folders(tmp_path / "letters", "abcdefghij", per_class=1)
    pool = make_pool(test_datasets={"mnist": table("abcdefghij")})
    pool.evaluate(model)
    assert pool.item_classes["mnist"] == DIGITS
    assert get_classnames_and_templates("mnist")[1][0]("7") == 'a photo of the number: "7".'
    with pytest.raises(CalibrationError, match="'a' is neither one of 10 class names"):
        make_pool(tasks={"mnist": {"data": str(letters)}})


CAT, TWO = {"image": picture(0), "label": 0}, {"classnames": ["cat", "dog"]}
SMALL = {"image": picture(0, (30, 20)), "label": 0}
unsized = lambda image: torch.zeros(3, image.height, image.width)  # noqa: E731


def of_items(*items: Any, task: str = "x", **definition: Any) -> dict[str, Any]:
    """Keys of a pool with items in memory."""
    tasks = {task: definition or TWO}
    return {"test_datasets": {task: [*items]}, "tasks": tasks, "data_processor": unsized}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # refused before anything is loaded
        ({"tasks": {"task": {}}}, "task 'task' needs its data once: set either"),
        ({"task": {}}, r"taskpool\.task is unknown \(nearest: 'tasks'\)"),
        ({"dataloader_kwargs": {"shuffle": True}}, r"dataloader_kwargs\.shuffle must be false"),
        ({"x": {"data": "./nowhere"}}, r"tasks\.x cannot be loaded: data './nowhere' does not"),
        ({"x": {"clasnames": []}}, r"x\.clasnames is unknown \(nearest: 'classnames'"),
        ({"x": {"classnames": [True, "maybe"]}}, "yes, no, on and off in quotes.*True"),
        ({"x": {"templates": ["a photo"]}}, r"prompts with \{\} for the class name.*'a photo'"),
        ({"x": {"data": {"_target_": LOAD}, "split": "a"}}, "split 'a' has no effect.*its keys"),
        ({"x": {"data": "SHAPES/circle"}}, r"tasks\.x: .*circle' has no labels"),
        # refused when they are evaluated
        (of_items(CAT, CAT | {"label": 2}), r"test_datasets\.x, item 1: label 2 is neither"),
        (of_items({"image": picture(0)}), r"task 'x'.*item 0 has no label"),
        (of_items(), r"task 'x' has no test items"),
        (of_items(CAT, SMALL), r"task 'x'.*one size.*\[3, 28, 28\].* and \[3, 20, 30\]"),
        (of_items(CAT, task="mnist", templates="x {}"), "FusionBench has class names and templ"),
    ],
)  # fmt: skip
def test_keys_and_items_that_cannot_be_used_are_named(make_pool, shapes, model, keys, message):
    keys = {"tasks": keys} if "x" in keys else keys
    for task in keys.get("tasks", {}).values():
        if task.get("data") == "SHAPES/circle":
            task["data"] = str(shapes / "circle")
    with pytest.raises(REFUSALS, match=message):
        make_pool(**keys).evaluate(model)


class Projected(torch.nn.Module):
    """An image encoder that projects its features, as open_clip's do."""

    def __init__(self, tower: Any, projection: torch.nn.Module) -> None:
        super().__init__()
        self.tower, self.projection = tower, projection

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.projection(self.tower(pixels).pooler_output)


def test_encoders_that_project_are_evaluated_as_the_tower_alone(
    make_pool, two_tasks, model, clip_folder
):
    projection = CLIPModel.from_pretrained(clip_folder).visual_projection
    pools = make_pool(tasks=two_tasks), make_pool(kind=OpenClipTaskPool, tasks=two_tasks)
    reports = [pools[0].evaluate(model), pools[1].evaluate(Projected(model, projection))]
    for task in two_tasks:
        assert torch.equal(pools[0].item_correct[task], pools[1].item_correct[task])
        assert reports[1][task] == pytest.approx(reports[0][task], abs=ROUNDING)
    with pytest.raises(CalibrationError, match=r"features have 5 channels, .* 12: they belong"):
        pools[1].evaluate(Projected(model, torch.nn.Linear(16, 5)))


def test_model_with_nan_is_refused(make_pool, two_tasks, model):
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    pool = make_pool(tasks=two_tasks)
    with pytest.raises(CalibrationError, match="task 'shapes': the evaluated model gives logits"):
        pool.evaluate(model)
    assert pool.item_correct == {}
