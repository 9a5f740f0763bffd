"""Products are exact, whatever short cuts the caller allows, and its choice stays."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from tiny_models import clip_suite

from fusion_bench_featcal.core.float32_products import (
    convolving_as_multiplying,
    exact_products,
    products_in_force,
)

backends: Any = torch.backends  # typed without its newer attributes
BACKENDS = [backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.mkldnn.conv]


@pytest.fixture(params=["older function", "everything at once"])
def allowed(request: pytest.FixtureRequest) -> Iterator[None]:
    """A caller that allows short cuts, in torch's two ways of doing so."""
    before = [backend.fp32_precision for backend in BACKENDS]
    for backend in BACKENDS:  # torch's defaults, which some of FusionBench's mergers change
        backend.fp32_precision = "tf32" if backend is backends.cudnn.conv else "none"
    if request.param == "older function":
        torch.set_float32_matmul_precision("medium")
    else:
        backends.fp32_precision = "tf32"
    chosen = products_in_force()
    yield
    assert products_in_force() == chosen
    backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("allowed")
def test_exact_products_take_no_short_cut_and_leave_the_callers_choice():
    with convolving_as_multiplying():
        assert products_in_force()["cudnn.conv"] == "tf32"  # as the products of this caller
    with exact_products(), convolving_as_multiplying():
        result = products_in_force()
        for name in ("cuda.matmul", "mkldnn.matmul", "cudnn.conv"):
            assert result[name] == "ieee"


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("allowed", ["everything at once"], indirect=True)
def test_short_cuts_that_the_caller_allows_give_the_same_model():
    suite = clip_suite(tasks=2).to(torch.float32)
    with exact_products():
        exact = run_fast(suite).model
    # Forward passes follow the caller, which shows on CPUs that multiply in bfloat16 (AMX).
    assert_identical(run_fast(suite, autocast=exact_products).model, exact)
