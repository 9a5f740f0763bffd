"""Gaussian noise, motion blur and fog as in ImageNet-C, for RGB pictures of any size.

Formulas and constants come from Hendrycks & Dietterich, "Benchmarking Neural Network Robustness to
Common Corruptions and Perturbations" (ICLR 2019), and from ImageNet-C's code
(github.com/hendrycks/robustness). They are for pictures whose shorter side has 224 pixels.
"""

import hashlib
from collections.abc import Callable
from math import ceil, cos, pi, sin

import numpy as np
from PIL import Image, ImageOps
from scipy.signal import fftconvolve

from fusion_bench_featcal.data.images import ImageItems
from fusion_bench_featcal.errors.nearest_names import refuse_unknown
from fusion_bench_featcal.settings import CORRUPTIONS, SEVERITIES

PUBLISHED_SIDE = 224

# By severity: standard deviation of the noise, for pixels in 0..1.
_NOISE = (0.08, 0.12, 0.18, 0.26, 0.38)
# Half the length of the path and standard deviation of its Gaussian weights, in pixels.
_MOTION = ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))
# Density of the fog, and the factor by which its waves shrink with each halving of their length.
_FOG = ((1.5, 2.0), (2.0, 2.0), (2.5, 1.7), (2.5, 1.5), (3.0, 1.4))
_MAX_ANGLE = pi / 4  # of motion, from the horizontal


def corrupted(
    data: object,
    corruption: str,
    severity: int = 3,
    seed: int = 42,
    task: str = "",
    size: int | None = None,
) -> ImageItems:
    """Corrupt the images of a dataset as ImageNet-C.

    The random numbers of an image depend on `seed`, `task` and its position only, so the severities
    of one corruption share their noise, direction or clouds.

    Args:
        data: The dataset, in YAML a mapping with `_target_` (`load_images` for a path or hub id).
        corruption: `gaussian_noise`, `motion_blur` or `fog`.
        severity: 1 to 5.
        seed: Seed.
        task: Name of the task, part of the seed.
        size: Length in pixels to which the shorter side is resized first, such as 224 for
            ImageNet-C. None leaves images unchanged. A later reduction in size would weaken the
            noise.

    Returns:
        Items `{"image": RGB picture, "label": int}`.

    Raises:
        ValueError: If there is no such corruption or severity.
        CalibrationError: If the data are not one dataset of images.
    """
    refuse_unknown([corruption], CORRUPTIONS, "corruption=")
    if isinstance(severity, bool) or severity not in SEVERITIES:
        raise ValueError(f"severity must be an integer from 1 to 5, got {severity!r}")

    def change(picture: Image.Image, position: int) -> Image.Image:
        if size is not None:
            picture = ImageOps.scale(picture, size / min(picture.size), Image.Resampling.BICUBIC)
        return corrupt(picture, corruption, severity, seeded_random(seed, task, position))

    return ImageItems(data, name=f"data of corruption {corruption}", change=change)


def corrupt(
    picture: Image.Image, corruption: str, severity: int, random: np.random.Generator
) -> Image.Image:
    """Corrupt an RGB picture by a checked corruption and severity.

    Returns:
        A picture of the same size.
    """
    pixels = _FUNCTIONS[corruption](np.asarray(picture) / 255, severity, random)
    return Image.fromarray(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8))


def seeded_random(seed: int, task: str, position: int) -> np.random.Generator:
    """Return one picture's random generator, independent of the order of reading."""
    digest = hashlib.sha256(f"{seed}:{task}:{position}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "big"))


def gaussian_noise(pixels: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Add independent noise to every pixel and channel of `[h, w, channels]`, without clipping."""
    return pixels + random.normal(scale=_NOISE[severity - 1], size=pixels.shape)


def motion_blur(pixels: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Blur pixels `[h, w, channels]` along a random direction, with edge padding."""
    scale = min(pixels.shape[:2]) / PUBLISHED_SIDE
    kernel = motion_kernel(severity, scale, random.uniform(-_MAX_ANGLE, _MAX_ANGLE))
    margin = len(kernel) // 2
    padded = np.pad(pixels, ((margin, margin), (margin, margin), (0, 0)), mode="edge")
    return fftconvolve(padded, kernel[:, :, None], mode="valid", axes=(0, 1))


def motion_kernel(severity: int, scale: float, angle: float) -> np.ndarray:
    """Return the weights of a motion blur, `[side, side]` with an odd side and sum 1.

    The path starts at the centre with one half of a Gaussian, as in ImageMagick, which ImageNet-C
    uses. Points between pixels are distributed over their neighbours.

    Args:
        severity: 1 to 5.
        scale: Size of the picture relative to ImageNet-C, by which lengths are multiplied.
        angle: Direction of the motion, in radians from the horizontal.
    """
    radius, sigma = _MOTION[severity - 1]
    fine = max(1, ceil(scale))  # points per ImageNet-C pixel, so that large pictures have no gaps
    steps = np.arange(2 * radius * fine + 1) / fine
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    margin = ceil(2 * radius * scale) + 1
    kernel = np.zeros((2 * margin + 1, 2 * margin + 1))
    right, down = (margin + scale * steps * part for part in (cos(angle), sin(angle)))
    column, row = np.floor(right).astype(int), np.floor(down).astype(int)
    across, below = right - column, down - row
    for i, share_down in ((0, 1 - below), (1, below)):
        for j, share_right in ((0, 1 - across), (1, across)):
            np.add.at(kernel, (row + i, column + j), weights * share_down * share_right)
    return kernel / kernel.sum()


def fog(pixels: np.ndarray, severity: int, random: np.random.Generator) -> np.ndarray:
    """Add fog to pixels `[h, w, channels]`, scaled so that none exceeds the former maximum."""
    density, decay = _FOG[severity - 1]
    height, width = pixels.shape[:2]
    side = 2 ** ceil(np.log2(max(height, width, 2)))
    cloud = plasma(side, decay, random)[:height, :width, None]
    brightest = pixels.max()
    return (pixels + density * cloud) * brightest / (brightest + density)


def plasma(side: int, decay: float, random: np.random.Generator) -> np.ndarray:
    """Return random heights `[side, side]` in 0..1 by the diamond-square algorithm, on a torus.

    Args:
        side: A power of two.
        decay: Each halving of the distance between points divides the random part by its square,
            as in ImageNet-C's code.
        random: Random numbers.
    """
    heights = np.zeros((side, side))
    step, spread = side, 1.0
    while step > 1:
        half = step // 2
        corners = heights[::step, ::step]
        right, below = np.roll(corners, -1, axis=1), np.roll(corners, -1, axis=0)
        centres = _disturbed(corners + right + below + np.roll(right, -1, axis=0), spread, random)
        rows_before, columns_before = np.roll(centres, 1, axis=0), np.roll(centres, 1, axis=1)
        heights[half::step, half::step] = centres
        sums = corners + right + centres + rows_before
        heights[::step, half::step] = _disturbed(sums, spread, random)
        sums = corners + below + centres + columns_before
        heights[half::step, ::step] = _disturbed(sums, spread, random)
        step, spread = half, spread / decay**2
    heights -= heights.min()
    return heights / heights.max()


def _disturbed(sums: np.ndarray, spread: float, random: np.random.Generator) -> np.ndarray:
    """Return means of four neighbours, given their sums, plus uniform noise."""
    return sums / 4 + random.uniform(-spread, spread, sums.shape)


_FUNCTIONS: dict[str, Callable[[np.ndarray, int, np.random.Generator], np.ndarray]] = {
    "gaussian_noise": gaussian_noise,
    "motion_blur": motion_blur,
    "fog": fog,
}
