"""Corruptions have the published strength, scale with the picture, and repeat exactly."""

from itertools import pairwise
from math import cos, sin

import numpy as np
import pytest
from PIL import Image

from fusion_bench_featcal.data import corruptions
from fusion_bench_featcal.data.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    corrupt,
    motion_kernel,
    plasma,
    random_of,
)


def waves(side: int) -> np.ndarray:
    """A smooth picture `[side, side, 3]` in 0..1 that looks the same at every size."""
    places = (np.arange(side) + 0.5) / side
    across, down = np.meshgrid(places, places)
    every = [np.sin(9 * across + 5 * down), np.cos(11 * down), np.sin(6 * across * down + 1)]
    return np.stack(every, axis=2) / 2 + 0.5


def picture(side: int = 28) -> Image.Image:
    return Image.fromarray(np.rint(waves(side) * 255).astype(np.uint8))


@pytest.mark.parametrize(
    ("severity", "deviation"), [(1, 0.08), (2, 0.12), (3, 0.18), (4, 0.26), (5, 0.38)]
)
@pytest.mark.parametrize("side", [28, 224])
def test_noise_has_the_published_deviation_before_clipping(
    severity: int, deviation: float, side: int
) -> None:
    pixels = waves(side)
    noise = corruptions.gaussian_noise(pixels, severity, random_of(1, "a", 0)) - pixels
    error = deviation / np.sqrt(2 * noise.size)  # of a standard deviation that is estimated
    assert abs(noise.std() - deviation) < 4 * error
    assert abs(noise.mean()) < 4 * deviation / np.sqrt(noise.size)
    channels = np.corrcoef(noise.reshape(-1, 3).T)[np.triu_indices(3, 1)]
    assert np.abs(channels).max() < 4.5 / side  # independent colours


def moments(kernel: np.ndarray) -> tuple[np.ndarray, float]:
    """Mean displacement (right, down) and mean squared distance from the centre."""
    offsets = np.arange(len(kernel)) - len(kernel) // 2
    mean = np.array([(kernel.sum(0) * offsets).sum(), (kernel.sum(1) * offsets).sum()])
    return mean, float((kernel * (offsets[:, None] ** 2 + offsets**2)).sum())


@pytest.mark.parametrize(
    ("severity", "radius", "sigma"), [(1, 10, 3), (2, 15, 5), (3, 15, 8), (4, 15, 12), (5, 20, 15)]
)
@pytest.mark.parametrize("scale", [1 / 8, 1.0, 2.5])
def test_blur_is_a_half_gaussian_on_a_line(
    severity: int, radius: int, sigma: float, scale: float
) -> None:
    angle = 0.4
    steps = np.arange(0, 2 * radius + 1e-9, 1 / max(1, np.ceil(scale)))
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    kernel = motion_kernel(severity, scale, angle)
    mean, second = moments(kernel)
    assert kernel.min() >= 0 and kernel.sum() == pytest.approx(1)
    distance = scale * (weights * steps).sum()
    np.testing.assert_allclose(mean, distance * np.array([cos(angle), sin(angle)]), atol=1e-9)
    # Sharing a point among its neighbours adds at most 1/4 along each axis.
    exact = scale**2 * (weights * steps**2).sum()
    assert exact - 1e-9 <= second <= exact + 0.5


def test_blur_keeps_flat_pictures_and_the_mean_of_framed_ones() -> None:
    flat = np.full((40, 30, 3), 0.3)
    blurred = corruptions.motion_blur(flat, 5, random_of(0, "", 0))
    np.testing.assert_allclose(blurred, flat, atol=1e-12)
    framed = np.zeros((64, 64, 3))
    framed[24:40, 24:40] = waves(16)  # no path of this size reaches the border
    blurred = corruptions.motion_blur(framed, 3, random_of(0, "", 0))
    assert blurred.mean() == pytest.approx(framed.mean())
    assert blurred.var() < framed.var()


def test_blur_of_a_large_picture_is_that_of_a_small_one_enlarged() -> None:
    small, large = (
        corruptions.motion_blur(waves(side), 5, random_of(3, "", 0)) for side in (56, 224)
    )
    reduced = large.reshape(56, 4, 56, 4, 3).mean((1, 3))
    change = np.abs(reduced - waves(56)).mean()
    assert np.abs(reduced - small)[4:-4, 4:-4].mean() < 0.15 * change


def test_fog_keeps_the_range_and_lowers_the_contrast_by_the_published_factor() -> None:
    first, second = 0.9 * waves(48), 0.9 * waves(48)[::-1]
    first[0, 0] = second[0, 0] = 0.9  # the same brightest pixel
    for severity, density in zip(SEVERITIES, (1.5, 2.0, 2.5, 2.5, 3.0), strict=True):
        foggy = [
            corruptions.fog(pixels, severity, random_of(0, "", 5)) for pixels in (first, second)
        ]
        assert min(map(np.min, foggy)) >= 0 and max(map(np.max, foggy)) <= 0.9 + 1e-12
        difference = (first - second) * 0.9 / (0.9 + density)
        np.testing.assert_allclose(foggy[0] - foggy[1], difference, atol=1e-12)


@pytest.mark.parametrize("decay", [1.4, 3.0])
def test_clouds_are_rougher_with_less_decay_and_have_no_border(decay: float) -> None:
    heights = plasma(64, decay, random_of(0, "", 1))
    assert heights.min() == 0 and heights.max() == 1 and heights.shape == (64, 64)
    steps = np.abs(np.diff(heights, axis=0, append=heights[:1])).mean(axis=1)
    assert steps[-1] < 3 * steps[:-1].mean()  # from the last row round to the first
    rough = np.abs(np.diff(plasma(64, 1.4, random_of(0, "", 1)), axis=0)).mean()
    assert rough >= np.abs(np.diff(heights, axis=0)).mean()


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_severity_is_monotone_in_squared_error(corruption: str) -> None:
    def error(severity: int) -> float:
        made = [corrupt(clean, corruption, severity, random_of(0, "t", n)) for n in range(20)]
        return float(np.mean([(np.asarray(one, float) - np.asarray(clean)) ** 2 for one in made]))

    clean = picture()
    errors = [error(severity) for severity in SEVERITIES]
    assert all(mild < strong for mild, strong in pairwise(errors))


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("size", [(28, 28), (1, 1), (5, 40), (37, 20)])
def test_any_size(corruption: str, size: tuple[int, int]) -> None:
    made = corrupt(picture(40).resize(size), corruption, 3, random_of(0, "", 0))
    assert (made.mode, made.size) == ("RGB", size)
    if corruption != "gaussian_noise":  # grey stays grey
        grey = picture(40).resize(size).convert("L").convert("RGB")
        pixels = np.asarray(corrupt(grey, corruption, 3, random_of(0, "", 0)))
        assert (pixels == pixels[..., :1]).all()


def test_random_numbers_depend_on_seed_task_and_position() -> None:
    def draw(seed: int, task: str, position: int) -> float:
        return random_of(seed, task, position).random()

    assert draw(1, "a", 2) == draw(1, "a", 2)
    assert len({draw(1, "a", 2), draw(2, "a", 2), draw(1, "b", 2), draw(1, "a", 3)}) == 4
