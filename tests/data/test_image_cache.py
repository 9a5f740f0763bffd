"""Processed images, in threads and kept: the same bits, and never those of another image."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from tiny_images import picture
from torch import Tensor
from transformers import CLIPImageProcessor

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import calibration_batches, decode_workers
from fusion_bench_featcal.comparison import FeatCal
from fusion_bench_featcal.data import image_cache
from fusion_bench_featcal.data.image_cache import ImageCache, describe_processor
from fusion_bench_featcal.data.pictures import fixed_content
from fusion_bench_featcal.fusionbench.options import checked_choices

NUMBER = 24
BYTES = 3 * 8 * 8 * 4  # of one processed image


def make_processor(edge: int = 8) -> CLIPImageProcessor:
    return CLIPImageProcessor(
        size={"shortest_edge": edge}, crop_size={"height": edge, "width": edge}
    )


def jpeg(seed: int) -> bytes:
    stream = io.BytesIO()
    picture(seed, (20, 16)).save(stream, "JPEG")
    return stream.getvalue()


class Pool:
    """A model pool with one task; it counts what is read, and refuses other threads."""

    def __init__(self, values: list[Any]) -> None:
        self.train_dataset_names, self.values, self.reads = ["a"], values, 0
        self._owner = threading.get_ident()

    def load_train_dataset(self, task: str) -> "Pool":
        return self

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert threading.get_ident() == self._owner
        self.reads += 1
        return {"image": self.values[index]}


def pixels(
    pool: Any, images: ImageCache | None = None, processor: Any = None, **changes: Any
) -> Tensor:
    settings = FeatCalSettings(samples_per_task=NUMBER, batch_size=5).replace(**changes)
    processor = processor or make_processor()
    batches = calibration_batches(pool, ["a"], settings, processor, images=images)
    return torch.cat([batch["pixel_values"] for batch in batches["a"]])


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return pixels(Pool([jpeg(n) for n in range(NUMBER)]), decode_workers=0)


@pytest.fixture
def pool() -> Pool:
    return Pool([jpeg(n) for n in range(NUMBER)])


@pytest.mark.parametrize("workers", ["auto", 1, 4])
def test_threads_give_the_same_bits(pool, expected, workers):
    assert torch.equal(pixels(pool, decode_workers=workers), expected)


def test_threads_on_an_arrow_table_with_images(expected):
    table = datasets.Dataset.from_dict(
        {"image": [jpeg(n) for n in range(NUMBER)]},
        features=datasets.Features({"image": datasets.Image()}),
    )
    pool = SimpleNamespace(train_dataset_names=["a"], load_train_dataset=lambda task: table)
    assert torch.equal(pixels(pool, decode_workers=4), expected)


def test_error_in_a_thread_names_task_and_item_after_the_earlier_batches(pool, tmp_path):
    settings = FeatCalSettings(samples_per_task=NUMBER, batch_size=5, decode_workers=3)
    batches = calibration_batches(pool, ["a"], settings, make_processor())["a"]
    bad = batches.indices[12]
    pool.values[bad] = b"no picture"
    found = iter(batches)
    assert [len(next(found)["pixel_values"]) for _ in range(2)] == [5, 5]
    with pytest.raises(CalibrationError, match=rf"task 'a'.*item {bad}: image cannot be read"):
        next(found)
    pool.values[bad] = str(tmp_path / "missing.png")
    with pytest.raises(CalibrationError, match=rf"item {bad}: .*missing\.png does not exist"):
        pixels(pool, ImageCache(folder=str(tmp_path / "cache")))


def test_a_callable_is_not_shared_by_threads_unless_asked_for():
    def prepare(image: Any) -> Tensor:
        return torch.zeros(3, 2, 2)

    settings = FeatCalSettings()
    assert decode_workers(settings, prepare) == 0
    assert decode_workers(settings.replace(decode_workers=3), prepare) == 3


def test_second_calibration_takes_images_from_memory(pool, expected):
    images = ImageCache(limit_mb=1)
    first = pixels(pool, images)
    assert (pool.reads, images.used_bytes) == (NUMBER, NUMBER * BYTES)
    assert torch.equal(first, expected)
    assert torch.equal(pixels(pool, images, samples_per_task=10), expected[:10])
    assert pool.reads == NUMBER
    assert images.take_counts() == {"images_processed": NUMBER, "images_from_memory": 10}
    images.close()
    pixels(pool, images)
    assert pool.reads == 2 * NUMBER


def test_memory_stays_below_the_limit(pool, expected):
    images = ImageCache(limit_mb=7.5 * BYTES / 2**20)
    for _ in range(2):
        assert torch.equal(pixels(pool, images), expected)
        assert images.used_bytes == 7 * BYTES
    assert images.counts == {"images_processed": 2 * NUMBER - 7, "images_from_memory": 7}


def test_another_run_takes_images_from_the_folder(pool, expected, tmp_path):
    settings = FeatCalSettings(samples_per_task=NUMBER, cache_dir=str(tmp_path))
    for origin in ("images_processed", "images_from_disk"):
        batches = calibration_batches(pool, ["a"], settings, make_processor())
        found = torch.cat([batch["pixel_values"] for batch in batches["a"]])
        assert torch.equal(found, expected)
        assert batches["a"].images.take_counts() == {origin: NUMBER}


def from_disk(pool: Any, folder: Path, processor: Any = None) -> tuple[int, Tensor]:
    """How many images the folder gave, and all pixels."""
    images = ImageCache(folder=str(folder))
    found = pixels(pool, images, processor)
    return images.take_counts()["images_from_disk"], found


def test_an_image_that_has_changed_is_processed_again(tmp_path):
    files = [tmp_path / f"{n}.png" for n in range(NUMBER)]
    for number, file in enumerate(files):
        picture(number, (9, 9)).save(file)
    pool, folder = Pool([str(file) for file in files]), tmp_path / "cache"
    _, before = from_disk(pool, folder)
    picture(99, (9, 9)).save(files[3])
    number, after = from_disk(pool, folder)
    assert number == NUMBER - 1
    assert torch.equal(after, pixels(pool))
    assert not torch.equal(after, before)


def test_another_processor_or_other_software_finds_nothing(pool, tmp_path, monkeypatch):
    from_disk(pool, tmp_path)
    other = make_processor()
    other.image_mean = [0.5, 0.5, 0.5]
    assert from_disk(pool, tmp_path, other)[0] == 0
    assert from_disk(pool, tmp_path, make_processor())[0] == NUMBER
    monkeypatch.setattr(image_cache, "describe_software", lambda *_: {"pillow": "0"})
    assert from_disk(pool, tmp_path)[0] == 0


def flipped(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 4]) + data[-4:]


@pytest.mark.parametrize(
    "harm",
    [
        lambda data, other: data[:-9],
        lambda data, other: flipped(data),
        lambda data, other: b"",
        lambda data, other: other,
    ],
    ids=["cut", "flipped", "empty", "exchanged"],
)
def test_damaged_file_is_noticed_and_made_anew(pool, expected, tmp_path, caplog, harm):
    from_disk(pool, tmp_path)
    file, other = sorted(tmp_path.glob("*/*.safetensors"))[:2]
    whole = file.read_bytes()
    file.write_bytes(harm(whole, other.read_bytes()))
    number, found = from_disk(pool, tmp_path)
    assert number == NUMBER - 1
    assert torch.equal(found, expected)
    assert f"{file} (method.cache_dir) cannot be used" in caplog.text
    assert file.read_bytes() == whole


def test_file_that_is_a_folder_is_no_obstacle(pool, expected, tmp_path, caplog):
    from_disk(pool, tmp_path)
    file = min(tmp_path.glob("*/*.safetensors"))
    file.unlink()
    file.mkdir()
    assert torch.equal(from_disk(pool, tmp_path)[1], expected)
    assert caplog.text.count("cannot be used") == 1
    assert caplog.text.count("some images cannot be stored") == 1
    assert not list(tmp_path.glob("*/.*"))


def test_runs_may_share_a_folder_at_the_same_time(expected, tmp_path):
    def run(_: int) -> Tensor:
        return from_disk(Pool([jpeg(n) for n in range(NUMBER)]), tmp_path)[1]

    with ThreadPoolExecutor(4) as executor:
        for found in executor.map(run, range(8)):
            assert torch.equal(found, expected)
    assert len(list(tmp_path.glob("*/*"))) == NUMBER


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CalibrationError, match=r"method\.cache_dir .*file/x cannot be written"):
        ImageCache(folder=str(tmp_path / "file" / "x"))


def test_cache_folder_has_no_effect_on_a_callable_and_says_so(tmp_path, caplog):
    pool = Pool([np.full((2, 2, 3), n, np.uint8) for n in range(NUMBER)])

    def prepare(image: Any) -> Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255

    pixels(pool, processor=prepare, cache_dir=str(tmp_path))
    assert "method.cache_dir has no effect" in caplog.text
    assert describe_processor(prepare) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["bytes", "path", "mapping", "picture", "array"])
def test_kept_images_are_those_of_every_kind_of_item(kind, tmp_path):
    pictures = [picture(n, (10, 12)) for n in range(NUMBER)]
    for number, made in enumerate(pictures):
        made.save(tmp_path / f"{number}.png")
    files = [tmp_path / f"{n}.png" for n in range(NUMBER)]
    values: dict[str, list[Any]] = {
        "bytes": [file.read_bytes() for file in files],
        "path": files,
        "mapping": [{"bytes": None, "path": str(file)} for file in files],
        "picture": pictures,
        "array": [np.array(made) for made in pictures],
    }
    pool, expected = Pool(values[kind]), pixels(Pool(pictures), decode_workers=0)
    folder = tmp_path / "cache"
    assert torch.equal(from_disk(pool, folder)[1], expected)
    number, found = from_disk(pool, folder)
    assert (number, torch.equal(found, expected)) == (NUMBER, True)


def test_digests_tell_pictures_apart_by_size_too():
    tall, wide = (np.zeros(shape, np.uint8) for shape in ((4, 2, 3), (2, 4, 3)))
    assert fixed_content(tall, "x")[1] != fixed_content(wide, "x")[1]


def test_presets_and_cells_share_the_methods_folder():
    settings = FeatCalSettings()
    for key, value in {"cache_dir": "x", "pixel_cache_mb": 1}.items():
        with pytest.raises(ValueError, match=rf"method\.presets\.p\.{key}: set method\.{key}"):
            checked_choices(settings, {"p": {key: value}}, None, {})
    with pytest.raises(ValueError, match=r"cache_dir: set method\.cache_dir"):
        FeatCal(cache_dir="x")
