"""Products are exact, whatever short cuts the caller allows, and its choice stays."""

from typing import Any

import pytest
import torch
from calibrations import PLUS, run_fast
from tiny_models import clip_suite

from fusion_bench_featcal.core.float32_products import (
    convolving_as_multiplying,
    exact_products,
    products_in_force,
)

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
    for backend in BACKENDS:  # torch's defaults, which some of FusionBench's mergers change
        backend.fp32_precision = "tf32" if backend is backends.cudnn.conv else "none"
    request.param()
    asked = products_in_force()
    yield
    assert products_in_force() == asked
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("allowed")
def test_exact_products_take_no_short_cut():
    with exact_products():
        result = products_in_force()
        assert (result["cuda.matmul"], result["mkldnn.matmul"]) == ("ieee", "ieee")


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
@pytest.mark.parametrize("more", [{}, PLUS], ids=["paper", "plus"])
def test_every_way_of_allowing_short_cuts_gives_the_same_model(more: dict[str, Any]):
    suite = clip_suite().to(torch.float32)
    with exact_products():
        exact = run_fast(suite, **more).model.state_dict()
    # Forward passes follow the caller, which shows on CPUs that multiply in bfloat16 (AMX).
    calibrated = run_fast(suite, autocast=exact_products, **more).model.state_dict()
    assert all(torch.equal(tensor, calibrated[name]) for name, tensor in exact.items())
