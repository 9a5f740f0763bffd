"""Sums in fewer bits, only where asked; everything else stays exact."""

import pytest
import torch
from calibrations import cast, run_fast
from tiny_models import clip_suite
from torch import Tensor

from fusion_bench_featcal.engine.linear_sums import LinearSums
from fusion_bench_featcal.engine.precision import exact_products, summing_in

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def allowed():
    """A caller that allows short cuts."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("precision", "device", "wanted"),
    [
        ("float32", "cuda", "highest"),
        ("tf32", "cuda", "high"),
        ("tf32", "cpu", "highest"),
        ("bfloat16", "cuda", "highest"),
    ],
)
def test_short_cuts_only_where_asked_and_there(precision: str, device: str, wanted: str):
    with summing_in(precision, torch.device(device)):
        assert torch.get_float32_matmul_precision() == wanted
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == wanted


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def means_of(cal: Tensor, exp: Tensor, precision: str):
    sums = LinearSums(cal, mix_alpha=0.3, expert_weights=None)
    with summing_in(precision, CPU):
        sums.add(cal, exp, None)
        sums.close()
    return sums.means()


def test_bfloat16_rounds_rows_and_adds_up_in_float32():
    cal, exp = draw(700, 6, seed=0), draw(700, 6, seed=1)
    found, exact = means_of(cal, exp, "bfloat16"), means_of(cal, exp, "float32")
    rounded, shift = (x.bfloat16().double() for x in (cal, exp - cal))
    torch.testing.assert_close(found.gram.double(), rounded.T @ rounded / 700, rtol=1e-5, atol=1e-6)
    assert found.shift is not None
    torch.testing.assert_close(
        found.shift.double(), 0.3 * rounded.T @ shift / 700, rtol=1e-5, atol=1e-6
    )
    assert not torch.equal(found.gram, exact.gram)
    assert torch.equal(found.mean_cal, exact.mean_cal)


def test_weighted_rows_have_a_gram_that_is_one():
    cal = draw(700, 24, seed=4) @ draw(24, 24, seed=5)
    sums = LinearSums(cal, mix_alpha=0.0, expert_weights=None)
    weights = torch.full((700,), 0.01).index_fill(0, torch.arange(0, 700, 50), 1.0)
    with summing_in("bfloat16", CPU):
        sums.add(cal, None, weights)
    gram = sums.means().gram.double()
    assert torch.linalg.eigvalsh(gram)[0] >= -1e-7 * gram.norm()


def test_other_dtypes_stay_as_they_are():
    cal, exp = (draw(600, 6, seed=seed, dtype=torch.float64) for seed in (2, 3))
    assert torch.equal(means_of(cal, exp, "bfloat16").gram, means_of(cal, exp, "float32").gram)


def test_the_setting_reaches_the_calibration():
    suite = clip_suite().to(torch.float32)
    suite.inputs = cast(suite.inputs, torch.float32)
    models = {
        precision: dict(run_fast(suite, sums_precision=precision).model.named_parameters())
        for precision in ("float32", "tf32", "bfloat16")
    }
    merged = dict(suite.merged.named_parameters())
    for name, exact in models["float32"].items():
        assert torch.equal(exact, models["tf32"][name])  # which a CPU has not
        off = (models["bfloat16"][name] - exact).norm()
        assert off <= 0.02 * (exact - merged[name]).norm() + 1e-6 * exact.norm()
    assert any(not torch.equal(v, models["bfloat16"][n]) for n, v in models["float32"].items())
