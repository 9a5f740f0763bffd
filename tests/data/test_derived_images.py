"""Datasets made from others: the same images in any order, and messages that name the setting."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from omegaconf import OmegaConf
from tiny_images import picture, write_class_folders
from tiny_texts import TASKS as TEXT_TASKS
from tiny_texts import sentences

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench.modelpool import CLIPVisionModelPool

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches, draw_samples
from fusion_bench_featcal.data.corruptions import corrupt, random_of
from fusion_bench_featcal.data.pictures import to_pixels
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.tasks import NoiseImages, corrupted, load_images, mixed

PICTURES: list[dict[str, Any]] = [{"image": picture(n), "label": n} for n in range(6)]


def bytes_of(rows: Any, index: int) -> bytes:
    return rows[index]["image"].tobytes()


@pytest.mark.parametrize("corruption", ["gaussian_noise", "motion_blur", "fog"])
def test_items_are_corrupted_alike_in_any_order(corruption: str) -> None:
    rows = corrupted(PICTURES, corruption, 2, seed=5, task="a")
    backwards = {n: bytes_of(rows, n) for n in reversed(range(6))}
    for n, item in enumerate(PICTURES):
        expected = corrupt(item["image"], corruption, 2, random_of(5, "a", n))
        assert backwards[n] == bytes_of(rows, n) == expected.tobytes() != item["image"].tobytes()
        assert rows[n]["label"] == n
    assert len(rows) == 6
    assert bytes_of(corrupted(PICTURES, corruption, 2, seed=6, task="a"), 0) != backwards[0]
    assert bytes_of(corrupted(PICTURES, corruption, 2, seed=5, task="b"), 0) != backwards[0]


def test_a_table_and_a_folder_are_corrupted_as_their_pictures(tmp_path: Path) -> None:
    folder = write_class_folders(tmp_path / "shapes")
    listed = [{"image": load_images(str(folder))[n]["image"]} for n in range(12)]
    table = datasets.Dataset.from_dict(
        {"picture": [item["image"] for item in listed]},
        features=datasets.Features({"picture": datasets.Image()}),
    )
    known = [bytes_of(corrupted(listed, "fog"), n) for n in range(12)]
    assert [bytes_of(corrupted(str(folder), "fog"), n) for n in range(12)] == known
    split = corrupted(str(tmp_path), "fog", split="shapes")
    assert bytes_of(split, 11) == known[11]
    columns = corrupted(table, "fog", image_column="picture")
    assert [bytes_of(columns, n) for n in range(12)] == known


def test_images_are_resized_before_if_asked() -> None:
    rows = corrupted([picture(0, (40, 20))], "gaussian_noise", size=10)
    assert rows[0]["image"].size == (20, 10)


def calibrated_on(config: Any, task: str = "mini_greek", **settings: Any) -> Any:
    data: Any = OmegaConf.create({task: config})
    models: Any = {task: image.path(task)}
    pool = CLIPVisionModelPool(models=models, train_datasets=data)
    chosen = FeatCalSettings(samples_per_task=2, batch_size=2, **settings)
    batches = calibration_batches(pool, [task], chosen, image.load_processor())[task]
    return next(iter(batches))["pixel_values"].numpy()


GREEK = {
    "_target_": "fusion_bench_featcal.suites.image.load_split",
    "task": "mini_greek",
    "split": "train",
}
FOG = {"_target_": "fusion_bench_featcal.tasks.corrupted", "data": GREEK, "corruption": "fog"}


def test_yaml_corrupts_a_pools_data() -> None:
    settings = FeatCalSettings(samples_per_task=2)
    rows = corrupted(image.load_split("mini_greek", "train"), "fog", 3)
    expected = [
        to_pixels(rows[index]["image"], image.load_processor(), "").numpy()
        for index in draw_samples(len(rows), "mini_greek", settings)
    ]
    np.testing.assert_array_equal(calibrated_on(FOG), expected)
    clean, worse = calibrated_on(GREEK), calibrated_on(FOG | {"severity": 5})
    assert not np.array_equal(clean, expected) and not np.array_equal(worse, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"corruption": "frog"}, r"corruption must be one of .*fog, got 'frog' \(nearest: 'fog'\)"),
        ({"severity": 0}, "severity must be an integer from 1 to 5, got 0"),
        ({"severity": 6}, "severity must be an integer from 1 to 5, got 6"),
        ({"severity": 2.5}, "severity must be an integer from 1 to 5, got 2.5"),
        ({"severity": True}, "severity must be an integer from 1 to 5, got True"),
        ({"seed": -1}, "seed of corrupted data must be an integer >= 0, got -1"),
        ({"size": 0}, r"size of corrupted data must be .*an integer >= 1.*, got 0"),
        (
            {"data": {"path": "cars"}},
            "one dataset is needed, got a mapping of path: set its _target_",
        ),
        ({"data": "no/such/folder/there"}, "does not exist"),
    ],
)
def test_unfit_keys_are_refused_by_the_setting(changes: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message) as caught:
        calibrated_on(FOG | changes)
    assert "modelpool.train_datasets.mini_greek" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
def test_texts_are_refused(kind: Any) -> None:
    rows = kind(sentences(TEXT_TASKS[0]))
    message = "data of corruption fog.* no (image_column )?'image'"
    with pytest.raises((ValueError, CalibrationError), match=message):
        corrupted(rows, "fog")[0]


def test_mixed_sets_are_interleaved_in_equal_numbers() -> None:
    rows = mixed([PICTURES, NoiseImages(number=4, size=8), PICTURES[::-1]])
    assert len(rows) == 12
    assert bytes_of(rows, 3) == bytes_of(PICTURES, 1)
    assert bytes_of(rows, 4) == bytes_of(NoiseImages(number=4, size=8), 1)
    assert bytes_of(rows, 5) == bytes_of(PICTURES, 4)
    with pytest.raises(IndexError):
        rows[12]
    unfit: Any
    for unfit in ([], "cars", {}):
        with pytest.raises(ValueError, match="data of mixed datasets must be a list"):
            mixed(unfit)
    with pytest.raises(CalibrationError, match="mixed dataset 1: a dataset with a length"):
        mixed([PICTURES, "cars"])


def test_noise_images_are_independent_uniform_pixels() -> None:
    rows = NoiseImages(number=20, size=30, seed=3)
    pixels = np.stack([np.asarray(rows[n]["image"], float) for n in range(len(rows))])
    assert pixels.shape == (20, 30, 30, 3)
    assert abs(pixels.mean() - 127.5) < 4 * 73.9 / np.sqrt(pixels.size)
    assert abs(np.corrcoef(pixels[0].ravel(), pixels[1].ravel())[0, 1]) < 4 / np.sqrt(2700)
    assert bytes_of(rows, 7) == bytes_of(NoiseImages(number=99, size=30, seed=3), 7)
    with pytest.raises(IndexError):
        rows[20]
    with pytest.raises(ValueError, match="number of noise images must be an integer >= 1, got 0"):
        NoiseImages(number=0)
