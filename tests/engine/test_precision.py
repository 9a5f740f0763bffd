"""Sums in fewer bits, only where asked; everything else stays exact."""

from typing import Any

import pytest
import torch
from calibrations import run_fast
from tiny_models import clip_suite
from torch import Tensor

from fusion_bench_featcal.core import LinearSums
from fusion_bench_featcal.core.float32_products import (
    convolving_as_multiplying,
    exact_products,
    products_in_force,
)
from fusion_bench_featcal.core.products import summing_in

CPU = torch.device("cpu")


backends: Any = torch.backends  # typed without its newer attributes


def older_functions() -> None:
    torch.set_float32_matmul_precision("medium")


def everything_at_once() -> None:
    backends.fp32_precision = "tf32"


def backend_by_backend() -> None:
    backends.cuda.matmul.fp32_precision = "tf32"
    backends.mkldnn.matmul.fp32_precision = "bf16"


BACKENDS = [
    backends.cuda.matmul,
    backends.mkldnn.matmul,
    backends.cudnn.conv,
    backends.mkldnn.conv,
]


@pytest.fixture(
    params=[older_functions, everything_at_once, backend_by_backend],
    ids=lambda way: way.__name__,
)
def allowed(request: pytest.FixtureRequest):
    """A caller that allows short cuts, in each of torch's ways of saying so."""
    before = [backend.fp32_precision for backend in BACKENDS]
    request.param()
    asked = products_in_force()
    yield
    assert products_in_force() == asked
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("precision", "device", "wanted"),
    [
        ("auto", "cuda", "ieee"),
        ("tf32", "cuda", "tf32"),
        ("tf32", "cpu", "ieee"),
        ("bfloat16", "cuda", "ieee"),
    ],
)
def test_short_cuts_only_where_asked_and_there(precision: str, device: str, wanted: str):
    def matmuls() -> tuple[str, str]:
        found = products_in_force()
        return found["cuda.matmul"], found["mkldnn.matmul"]

    with summing_in(precision, torch.device(device)):
        assert matmuls() == (wanted, "ieee")
        with exact_products():
            assert matmuls() == ("ieee", "ieee")
        assert matmuls() == (wanted, "ieee")


@pytest.mark.usefixtures("allowed")
def test_convolutions_take_no_short_cut_that_products_may_not_take():
    with convolving_as_multiplying():
        assert products_in_force()["cudnn.conv"] == "tf32"  # as the products of this caller
    with exact_products(), convolving_as_multiplying():
        assert products_in_force()["cudnn.conv"] == "ieee"


@pytest.mark.usefixtures("allowed")
def test_a_setting_that_is_inherited_stays_inherited(request: pytest.FixtureRequest):
    with exact_products(), convolving_as_multiplying():
        pass
    if request.node.callspec.params["allowed"] is everything_at_once:
        backends.fp32_precision = "ieee"
        assert set(products_in_force().values()) == {"ieee"}
        backends.fp32_precision = "tf32"


@pytest.mark.usefixtures("allowed")
def test_every_way_of_allowing_short_cuts_gives_the_same_model():
    suite = clip_suite().to(torch.float32)
    with exact_products():
        exact = run_fast(suite).model.state_dict()
    found = run_fast(suite).model.state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in exact.items())


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def means_of(cal: Tensor, exp: Tensor, precision: str):
    sums = LinearSums(cal, mix_alpha=0.3, expert_weights=None)
    with summing_in(precision, CPU):
        sums.add(cal, exp, None)
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
    suite = clip_suite(tasks=2, depth=1).to(torch.float32)
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
