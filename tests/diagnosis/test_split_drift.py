"""The drift of rows, its two terms, and the plane of largest variance."""

import pytest
import torch
from torch import Tensor

from fusion_bench_featcal.diagnosis.drift import DriftParts, principal_plane, split_drift


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def columns(table: Tensor) -> dict[str, Tensor]:
    return dict(zip(DriftParts._fields, table.T, strict=True))


def test_terms_and_their_product_give_the_drift():
    found = columns(split_drift(normal(0, 9, 5), normal(1, 9, 5), normal(2, 9, 5)))
    squares = found["mismatch_sq"] + found["propagation_sq"] + 2 * found["product"]
    assert (squares - found["drift_sq"]).abs().max() < 1e-12
    assert (found["drift"] ** 2 - found["drift_sq"]).abs().max() < 1e-12


@pytest.mark.parametrize(("crossed", "term"), [(0, "propagation"), (1, "mismatch")])
def test_a_term_vanishes_where_the_crossed_features_are_one_sides(crossed, term):
    sides = normal(0, 9, 5), normal(1, 9, 5)
    found = columns(split_drift(*sides, sides[crossed]))
    other = "mismatch" if term == "propagation" else "propagation"
    assert found[term].max() == 0
    assert torch.equal(found[other], found["drift"])


def test_half_precision_is_summed_in_float32():
    sides = [normal(seed, 9, 5) for seed in range(3)]
    half = [side.bfloat16() for side in sides]
    found, wanted = split_drift(*half), split_drift(*(side.float() for side in half))
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_plane_keeps_distances_of_points_that_lie_in_one():
    basis = torch.linalg.qr(normal(0, 6, 2)).Q
    points = normal(1, 20, 2)
    found = principal_plane(points @ basis.T + 3)
    assert found.shape == (20, 2)
    assert (torch.cdist(found, found) - torch.cdist(points, points)).abs().max() < 1e-10
    variances = found.var(0)
    assert variances[0] >= variances[1]
    assert found.mean(0).abs().max() < 1e-12


def test_plane_does_not_depend_on_the_order_of_rows():
    points = normal(3, 15, 7)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(0))
    assert (principal_plane(points[order]) - principal_plane(points)[order]).abs().max() < 1e-10
