"""From pictures to tensors, and keeping them within a limit."""

import itertools

import pytest
import torch
from tiny_images import channels_first, picture

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.pictures import stack_pixels, to_pixels
from fusion_bench_featcal.tasks.scoring import PixelCache


def test_processor_gives_what_transformers_gives(processor):
    expected = processor(images=[picture(0, (40, 30))], return_tensors="pt")["pixel_values"][0]
    assert torch.equal(to_pixels(picture(0, (40, 30)), processor, "here"), expected)
    assert torch.equal(to_pixels(picture(0, (40, 30)), processor.image_processor, "here"), expected)


def test_callable_gets_an_rgb_picture():
    grey = picture(0).convert("L")
    assert torch.equal(to_pixels(grey, channels_first, "here"), channels_first(grey.convert("RGB")))


def test_callable_gets_arrays_as_they_are():
    array = torch.rand(5, 7)
    assert torch.equal(to_pixels(array, lambda x: x.expand(3, 5, 7), "here"), array.expand(3, 5, 7))


def test_failing_processor_names_the_item():
    def fail(image):
        raise ZeroDivisionError("no size")

    with pytest.raises(
        CalibrationError, match=r"item 3: .*28 x 28 image \(ZeroDivisionE.*: no size"
    ):
        to_pixels(picture(0), fail, "item 3")


@pytest.mark.parametrize(
    ("result", "got"),
    [
        (torch.zeros(2, 3, 4, 4), r"torch.float32 \[2, 3, 4, 4\]"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), r"torch.uint8 \[3, 4, 4\]"),
        ("nonsense", "<class 'str'>"),
    ],
)
def test_unfit_processor_says_what_it_gave(result, got):
    with pytest.raises(CalibrationError, match=rf"item 3: the processor must return .*got {got}"):
        to_pixels(picture(0), lambda image: result, "item 3")


def test_different_sizes_are_refused_with_both():
    images = [torch.zeros(3, 4, 4), torch.zeros(3, 4, 5)]
    expected = r"task 'x': images have different sizes .*\[3, 4, 4\] and \[3, 4, 5\]"
    with pytest.raises(CalibrationError, match=expected):
        stack_pixels(images, "task 'x'", "modelpool.processor")
    with pytest.raises(CalibrationError, match=r"to one size in modelpool\.processor"):
        stack_pixels(images[:1], "here", "modelpool.processor", images[1].shape)


class Loader:
    """Two batches of 16 + 32 bytes each, counting how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self):
        self.asked += 1
        for value in (1.0, 2.0):
            yield torch.full((4, 1, 1, 1), value), torch.zeros(4, dtype=torch.int64)


def test_tasks_that_fit_are_processed_once_and_give_the_same():
    cache, small, large = PixelCache(100 / 2**20), Loader(), Loader()
    passes = []
    for _ in range(3):
        passes.append([pixels.flatten().tolist() for pixels, _ in cache.batches("a", small)])
        assert len(list(cache.batches("b", large))) == 2
    assert (small.asked, large.asked) == (1, 3)
    assert passes == [[[1.0] * 4, [2.0] * 4]] * 3
    assert cache.used_bytes == 96


def test_a_pass_broken_off_is_not_kept():
    cache, loader = PixelCache(1), Loader()
    assert len(list(itertools.islice(cache.batches("a", loader), 1))) == 1
    assert len(list(cache.batches("a", loader))) == 2
    assert loader.asked == 2
