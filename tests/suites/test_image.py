"""The bundled pictures: sizes, colours and order, and FusionBench's view of the class names."""

import numpy as np
import pytest
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory, get_classnames_and_templates

from fusion_bench_featcal.suites import image

# train and test pictures, classes, fewest and most pictures of a class in the train split
EXPECTED = {
    "mini_mnist": (3256, 1000, 10, 284, 379),
    "mini_fashion_mnist": (3256, 1000, 10, 303, 336),
    "mini_notmnist": (3256, 1000, 10, 314, 344),
    "mini_optdigits": (1256, 541, 10, 115, 132),
    "mini_latin": (364, 156, 26, 14, 14),
    "mini_greek": (336, 144, 24, 14, 14),
    "mini_balinese": (336, 144, 24, 14, 14),
    "mini_korean": (560, 240, 40, 14, 14),
}


def test_the_task_sets_partition_the_eight_tasks():
    assert tuple(EXPECTED) == image.ALL8 == image.TA6 + image.ALPHABETS2
    assert (len(image.TA6), len(image.ALPHABETS2)) == (6, 2)


@pytest.mark.parametrize("task", EXPECTED)
def test_sizes_and_class_counts(task):
    train, test, classes, fewest, most = EXPECTED[task]
    sets = {split: image.load_split(task, split) for split in ("train", "test")}
    assert (len(sets["train"]), len(sets["test"])) == (train, test)
    for pictures in sets.values():
        assert set(np.unique(pictures.labels)) == set(range(classes))
    counts = np.bincount(sets["train"].labels)
    assert (counts.min(), counts.max()) == (fewest, most)
    assert len(image.load_arrays(task).classnames) == classes


@pytest.mark.parametrize("task", EXPECTED)
def test_train_and_test_share_no_picture_but_those_on_record(task):
    arrays = image.load_arrays(task)
    train, test = (
        [picture.tobytes() for picture in arrays.rows(split)[0]] for split in ("train", "test")
    )
    # notMNIST has fonts that differ in name only; ORIGINS.md says so
    shared = set(train).intersection(test)
    assert sum(picture in shared for picture in test) == (14 if task == "mini_notmnist" else 0)


@pytest.mark.parametrize("task", EXPECTED)
def test_items_are_rgb_pictures_in_the_tasks_colours(task):
    colours = image.find_task(task)
    item = image.load_split(task, "test")[3]
    pixels = np.asarray(item["image"])
    assert item["image"].mode == "RGB" and pixels.shape == (28, 28, 3)
    assert isinstance(item["label"], int)
    low, high = (np.minimum(colours.paper, colours.ink), np.maximum(colours.paper, colours.ink))
    assert (pixels >= low).all() and (pixels <= high).all()


def test_paint_runs_from_paper_to_ink():
    task = image.ImageTask("any", paper=(0, 100, 50), ink=(255, 0, 50))
    painted = task.paint(np.array([[0, 255, 51]], dtype=np.uint8))
    assert painted.tolist() == [[[0, 100, 50], [255, 0, 50], [51, 80, 50]]]


def test_loading_twice_gives_the_same_items_in_the_same_order():
    first, second = (image.load_split("mini_greek", "train") for _ in range(2))
    assert [item["label"] for item in first] == [item["label"] for item in second]
    pixels, again = ([item["image"].tobytes() for item in split] for split in (first, second))
    assert pixels == again


def test_a_split_can_be_iterated_to_its_end():
    assert sum(1 for _ in image.load_split("mini_latin", "test")) == 156


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="no image task 'mnist'; there are mini_mnist"):
        image.load_split("mnist", "train")
    with pytest.raises(ValueError, match="no mini_mnist split 'val'; there are train, test"):
        image.load_split("mini_mnist", "val")


@pytest.mark.parametrize(
    "load", [image.load_processor, lambda: image.load_split("mini_latin", "test")]
)
def test_loading_makes_the_class_names_known_to_fusionbench(load, monkeypatch):
    mapping = {
        name: entry
        for name, entry in CLIPTemplateFactory._dataset_mapping.items()
        if name not in image.TASKS
    }
    monkeypatch.setattr(CLIPTemplateFactory, "_dataset_mapping", mapping)
    load()
    for name in image.TASKS:
        classnames, templates = get_classnames_and_templates(name)
        assert [templates[0](word) for word in classnames] == image.load_arrays(name).prompts()


def test_registering_leaves_what_others_registered(monkeypatch):
    own = {"classnames": ["x"], "templates": [str]}
    monkeypatch.setattr(CLIPTemplateFactory, "_dataset_mapping", {"mini_mnist": own})
    image.register_class_names()
    assert CLIPTemplateFactory._dataset_mapping["mini_mnist"] is own
