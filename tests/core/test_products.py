"""Matrix products: exact in both libraries, whatever shortcuts the caller allows."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, assert_same, run_fast
from mixture_types import mixture_suite
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, clip_suite
from torch import Tensor
from torch.nn import functional

from fusion_bench_featcal.core import kernels, moments, products
from fusion_bench_featcal.core.float32_products import exact_products, products_in_force
from fusion_bench_featcal.run import state

needs_onednn = pytest.mark.skipif(not kernels.onednn_works(), reason="torch lacks the operator")
backends: Any = torch.backends  # typed without its newer attributes
MIXTURE = partial(mixture_suite, "qwen3_moe", ([6, 7], [4]))
BACKENDS = [backends.cuda.matmul, backends.mkldnn.matmul, backends.cudnn.conv, backends.mkldnn.conv]


@needs_onednn
def test_linear_maps_of_any_layout_and_dtype_are_right(monkeypatch: pytest.MonkeyPatch):
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(10)[::2]
    maps = [(x, weight, bias), (x, weight, torch.tensor(2.0)), (x, weight[0], None),
            (x[:, :0], weight[:, :0], bias),
            (x.double(), weight.double(), bias.double())]  # fmt: skip
    expected = [functional.linear(*tensors) for tensors in maps]
    with kernels.with_kernel(kernels.ONEDNN, lambda: torch.autocast("cpu", enabled=False))():
        results = [functional.linear(*tensors) for tensors in maps]
    monkeypatch.setattr(products, "LARGEST_PRODUCT", 6)
    total = torch.ones(5, 3)
    with kernels.using_kernel(kernels.ONEDNN):
        products.add_product(total, weight, x, 2.0)  # in strips
    for pair in zip([*results, total], [*expected, 1 + 2 * weight @ x.T], strict=True):
        torch.testing.assert_close(*pair)


@needs_onednn
@pytest.mark.parametrize("kernel", [kernels.TORCH, kernels.ONEDNN])
def test_quadratic_forms_agree_with_sums_over_rows(monkeypatch: pytest.MonkeyPatch, kernel: str):
    monkeypatch.setattr(products, "SMALL", 3)  # four strips, the last one narrower
    weight, rows = torch.randn(5, 11), torch.randn(20, 11)
    moment = rows.T @ rows
    expected = (rows.double() @ weight.double().T).square().sum()
    with kernels.using_kernel(kernel):
        total = products.quadratic(weight, moment)
    # Sums of at most 11 and 20 products in float32, of terms that are not all positive.
    terms = (weight.abs() @ moment.abs() * weight.abs()).sum()
    bound = 31 * torch.finfo(torch.float32).eps * terms
    assert abs(total - expected) <= bound


@needs_onednn
def test_both_libraries_give_one_model(monkeypatch: pytest.MonkeyPatch):
    suite, results = clip_suite(tasks=2).to(torch.float32), {}
    for kernel in (kernels.TORCH, kernels.ONEDNN):
        monkeypatch.setattr(state, "choose_kernel", lambda _, kernel=kernel: kernel)
        results[kernel] = run_fast(suite)
        assert results[kernel].log.select("engine")[0]["linear_kernel"] == kernel
    assert_same(results[kernels.ONEDNN].model, results[kernels.TORCH].model, bound=1e-5)
    # processes use one that all of them have
    assert kernels.agreed_kernel([kernels.ONEDNN, kernels.TORCH]) == kernels.TORCH


@pytest.fixture
def shortcuts() -> Iterator[None]:
    """TF32 in all float32 products, as a caller may allow."""
    before = [backend.fp32_precision for backend in BACKENDS]
    backends.fp32_precision = "tf32"
    yield
    backends.fp32_precision = "none"
    for backend, precision in zip(BACKENDS, before, strict=True):
        backend.fp32_precision = precision


@pytest.mark.usefixtures("shortcuts")
def test_shortcuts_of_the_caller_change_no_model_and_stay_its_choice():
    suite, chosen = clip_suite(tasks=2).to(torch.float32), products_in_force()
    with exact_products():
        exact, in_force = run_fast(suite).model, products_in_force()
    assert {in_force[name] for name in ("cuda.matmul", "mkldnn.matmul")} == {"ieee"}
    # Forward passes follow the caller, which shows on CPUs that multiply in bfloat16 (AMX).
    assert_identical(run_fast(suite, autocast=exact_products).model, exact)
    assert products_in_force() == chosen


@pytest.mark.usefixtures("shortcuts")
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize(
    "make", [clip_suite, pytest.param(MIXTURE, marks=NEEDS_RELEASE_5)], ids=["clip", "mixture"]
)
def test_no_sum_takes_a_shortcut(
    monkeypatch: pytest.MonkeyPatch, make: Callable[..., Suite], plus: bool
):
    in_force = list[str]()

    def watching(product: Callable[..., Any], matrix: Tensor, *others: Any) -> Any:
        if matrix.dtype == torch.float32:  # sums of drifts are in float64
            in_force.append(products_in_force()["cuda.matmul"])
        return product(matrix, *others)

    for name in ("add_lower_gram", "add_product", "multiply_by_rows", "quadratic"):
        monkeypatch.setattr(moments, name, partial(watching, getattr(moments, name)))
    run_fast(make().to(torch.float32), **PLUS if plus else {})
    assert {*in_force} == {"ieee"}
