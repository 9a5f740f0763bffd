"""The drift of rows, its two terms and metrics, and shares of variance."""

import pytest
import torch
from torch import Tensor

from fusion_bench_featcal.lab.diagnosis.drift import (
    COLUMNS,
    drift_metrics,
    explained_shares,
    split_drift,
)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_half_precision_is_summed_in_float32():
    sides = [normal(seed, 9, 5) for seed in range(3)]
    half = [side.bfloat16() for side in sides]
    found, wanted = split_drift(*half), split_drift(*(side.float() for side in half))
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


def test_metrics_of_a_block():
    features, expert, crossed = (normal(seed, 9, 5) for seed in range(3))
    table = split_drift(features, expert, crossed)
    found = drift_metrics(dict(zip(COLUMNS, table.mean(0).tolist(), strict=True)))
    e, m, p = features - expert, crossed - expert, features - crossed
    wanted = {
        "drift": e.norm(dim=1).mean(),
        "relative": (e.square().sum() / expert.square().sum()).sqrt(),
        "cosine": torch.cosine_similarity(features, expert).mean(),
        "mismatch": m.norm(dim=1).mean(),
        "propagation": p.norm(dim=1).mean(),
        "between": (m * p).sum() / (m.norm() * p.norm()),
        "share": 1 - (m * e).sum() / e.square().sum(),  # without that of the mismatch
    }
    assert found == pytest.approx({name: value.item() for name, value in wanted.items()})


def test_metrics_without_drift():
    assert set(drift_metrics(dict.fromkeys(COLUMNS, 0.0)).values()) == {0.0}


def test_shares_of_variance():
    basis = torch.linalg.qr(normal(0, 6, 3)).Q
    points = normal(1, 20, 3)
    found = explained_shares(points @ basis.T + 3)
    variances = torch.linalg.eigvalsh(torch.cov(points.T)).flip(0)
    assert found == pytest.approx((variances / variances.sum())[:2].tolist())
    assert explained_shares(torch.ones(4, 3)) == [0, 0]
