"""Corrupted images have the published strength, and repeat exactly in any order."""

from math import atan2, erf, hypot, pi, sqrt
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tiny_images import picture

from fusion_bench_featcal.tasks import corrupted

PICTURES: list[dict[str, Any]] = [{"image": picture(n), "label": n} for n in range(6)]


def corrupt(pixels: Any, corruption: str, severity: int) -> np.ndarray:
    """Pixels in 0..1 of one corrupted image, which is stored in 8 bits."""
    stored = np.rint(np.asarray(pixels) * 255).astype(np.uint8)
    rows = [{"image": Image.fromarray(stored)}]
    return np.asarray(corrupted(rows, corruption, severity)[0]["image"]) / 255


@pytest.mark.parametrize(("severity", "deviation"), [(1, 0.08), (3, 0.18), (5, 0.38)])
def test_noise_is_gaussian_and_independent_with_the_published_deviation(severity, deviation):
    noise = corrupt(np.full((224, 224, 3), 127 / 255), "gaussian_noise", severity) - 127 / 255
    for limit in (25.5 / 255, 100.5 / 255):  # larger values may be clipped
        share = (np.abs(noise) < limit).mean()
        # 150,528 values: four standard errors of a share are at most 4 * 0.5 / 388
        assert share == pytest.approx(erf(limit / deviation / sqrt(2)), abs=0.006)
    correlations: Any = np.corrcoef(noise.reshape(-1, 3).T)
    assert abs(correlations[np.triu_indices(3, 1)]).max() < 4.5 / 224  # 4.5 standard errors


def test_blur_keeps_the_mean_and_shifts_an_edge_by_that_of_half_a_gaussian():
    assert corrupt(np.full((28, 28, 3), 0.2), "motion_blur", 5) == pytest.approx(0.2)
    for severity, radius, sigma, side in ((1, 10, 3, 28), (5, 20, 15, 300)):
        scale, shifts = side / 224, []
        for axis in (1, 0):  # along each axis an edge is shifted by that part of the path
            edge = np.zeros((side, side, 3))
            (edge[:, side // 2 :] if axis else edge[side // 2 :])[:] = 1
            change = edge - corrupt(edge, "motion_blur", severity)
            shifts.append(change.mean((1 - axis, 2)).sum())
        steps = np.arange(0, 2 * radius + 1e-9, 1 / max(1, np.ceil(scale)))
        weights = np.exp(-(steps**2) / (2 * sigma**2))
        assert hypot(*shifts) == pytest.approx(np.average(steps, weights=weights) * scale, abs=0.06)
        assert abs(atan2(shifts[1], shifts[0])) <= pi / 4


def test_fog_keeps_the_range_and_lowers_the_contrast_by_the_published_factor():
    first, second = (np.random.default_rng(seed).uniform(0, 0.9, (48, 48, 3)) for seed in (0, 1))
    first[0, 0] = second[0, 0] = 0.9  # the same brightest pixel
    for severity, density in enumerate((1.5, 2.0, 2.5, 2.5, 3.0), start=1):
        foggy = [corrupt(pixels, "fog", severity) for pixels in (first, second)]
        assert max(map(np.max, foggy)) <= 0.904
        expected = (first - second) * 0.9 / (0.9 + density)
        np.testing.assert_allclose(foggy[0] - foggy[1], expected, atol=0.007)


@pytest.mark.parametrize("corruption", ["gaussian_noise", "motion_blur", "fog"])
def test_an_image_depends_on_seed_task_and_position_alone(corruption):
    def content(rows: Any, index: int) -> bytes:
        return rows[index]["image"].tobytes()

    rows = corrupted(PICTURES, corruption, 2, seed=5, task="a")
    backwards = {n: content(rows, n) for n in reversed(range(6))}
    assert [(rows[n]["label"], content(rows, n)) for n in range(6)] == sorted(backwards.items())
    copies = corrupted(6 * PICTURES[:1], corruption, 2, seed=5, task="a")
    variants = [content(copies, n) for n in range(6)]
    assert variants[0] == backwards[0]
    for options in ({"seed": 6, "task": "a"}, {"seed": 5, "task": "b"}):
        variants.append(content(corrupted(PICTURES, corruption, 2, **options), 0))
    assert len({*variants, content(PICTURES, 0)}) == 9


def test_wrong_keys_are_refused():
    with pytest.raises(ValueError, match=r"corruption=frog is unknown \(nearest: 'fog'"):
        corrupted(PICTURES, "frog")
    with pytest.raises(ValueError, match="severity must be an integer from 1 to 5, got 6"):
        corrupted(PICTURES, "fog", 6)
