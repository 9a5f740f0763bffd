"""The bundled pictures: sizes, colours and order, and FusionBench's view of the class names."""

import numpy as np
import pytest
from fusion_bench.tasks.clip_classification import CLIPTemplateFactory, get_classnames_and_templates

from fusion_bench_featcal.suites import image


@pytest.mark.parametrize("task", image.ALL8)
def test_train_and_test_share_no_picture_but_those_on_record(task):
    arrays = image.load_arrays(task)
    train, test = (
        [picture.tobytes() for picture in arrays.rows(split)[0]] for split in ("train", "test")
    )
    # notMNIST has fonts that differ in name only; ORIGINS.md says so
    shared = set(train).intersection(test)
    assert sum(picture in shared for picture in test) == (14 if task == "mini_notmnist" else 0)


@pytest.mark.parametrize("task", image.ALL8)
def test_items_are_rgb_pictures_in_the_tasks_colours(task):
    colours = image.find_task(task)
    item = image.load_split(task, "test")[3]
    pixels = np.asarray(item["image"])
    assert item["image"].mode == "RGB" and pixels.shape == (28, 28, 3)
    assert isinstance(item["label"], int)
    low, high = (np.minimum(colours.paper, colours.ink), np.maximum(colours.paper, colours.ink))
    assert (pixels >= low).all() and (pixels <= high).all()


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
