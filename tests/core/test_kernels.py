"""Both libraries give the same result up to rounding, and each run chooses between them."""

from pathlib import Path

import pytest
import torch
from calibrations import assert_identical, assert_same, run_fast
from tiny_models import clip_suite
from torch import nn
from torch.nn import functional

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.core import kernels, products
from fusion_bench_featcal.core.kernels import (
    ONEDNN,
    TORCH,
    agreed_kernel,
    choose_kernel,
    using_kernel,
    with_kernel,
)

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not kernels.onednn_works(), reason="torch lacks the operator")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the inputs that go to oneDNN."""
    kernels.onednn_works()
    shapes: list[tuple[int, ...]] = []
    original = kernels._onednn_linear

    def counted(x, weight, bias=None):
        shapes.append(tuple(x.shape))
        return original(x, weight, bias)

    monkeypatch.setattr(kernels, "_onednn_linear", counted)
    return shapes


def test_processes_agree_on_what_all_of_them_have():
    assert agreed_kernel([ONEDNN, TORCH]) == agreed_kernel([TORCH, TORCH]) == TORCH
    assert agreed_kernel([ONEDNN, ONEDNN]) == ONEDNN


@pytest.mark.parametrize(
    ("vendor", "capability", "has_mkl", "chosen"),
    [("AuthenticAMD", "AVX512", True, ONEDNN), ("AuthenticAMD", "AVX2", True, TORCH),
     ("AuthenticAMD", "AVX512", False, TORCH), ("GenuineIntel", "AVX512", True, TORCH),
     (None, "DEFAULT", False, TORCH)],
)  # fmt: skip
def test_auto_goes_by_the_processor(vendor, capability, has_mkl, chosen, monkeypatch):
    lines = "processor: 0\n" + (f"vendor_id\t: {vendor}\n" if vendor else "Features: asimd\n")
    monkeypatch.setattr(kernels.Path, "read_text", lambda *_, **__: lines)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(kernels, "processor", kernels.processor.__wrapped__)
    monkeypatch.setattr(kernels, "onednn_works", lambda: True)
    assert choose_kernel("auto", CPU) == chosen
    assert choose_kernel(ONEDNN, CPU) == ONEDNN
    assert choose_kernel(ONEDNN, torch.device("meta")) == TORCH


def test_an_operator_that_fails_or_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch):
    def missing(*_):
        raise AttributeError("no such operator")

    for broken in (missing, lambda x, weight, bias: torch.zeros(3, 5, 4)):
        monkeypatch.setattr(kernels, "_onednn_linear", broken)
        assert not kernels.onednn_works.__wrapped__()


@needs_onednn
def test_large_products_are_added_in_strips(monkeypatch: pytest.MonkeyPatch):
    first, second = torch.randn(5, 7), torch.randn(3, 7)
    monkeypatch.setattr(products, "LARGEST_PRODUCT", 6)
    total = torch.ones(5, 3)
    with using_kernel(ONEDNN):
        products.add_product(total, first, second, 2.0)
    torch.testing.assert_close(total, 1 + 2 * first @ second.T)


@needs_onednn
def test_only_float32_linear_maps_that_it_gets_right_go_to_onednn(calls: list[tuple[int, ...]]):
    x, weight, module = torch.randn(3, 4), torch.randn(5, 4), nn.Linear(4, 5)
    bias = torch.randn(10)[::2]
    odd = [(x, weight, bias), (x, weight, bias[:1].expand(5)), (x, weight, torch.tensor(2.0))]
    odd += [(x, weight[0], None), (x[:, :0], weight[:, :0], bias)]
    with torch.no_grad():
        expected = [functional.linear(*tensors) for tensors in odd]
        with with_kernel(ONEDNN, lambda: torch.autocast("cpu", enabled=False))():
            result = [functional.linear(*tensors) for tensors in odd]
            calls.clear()
            right = functional.linear(x, module.weight, module.bias)
            torch.testing.assert_close(module(x), right)
            assert len(calls) == 2
            module.double()(x.double())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                module.float()(x)
            assert len(calls) == 2
    for pair in zip(result, expected, strict=True):
        torch.testing.assert_close(*pair)


@needs_onednn
def test_calibrations_agree_whatever_multiplies_and_resumed_ones_use_one_kernel(
    calls: list[tuple[int, ...]], tmp_path: Path
):
    suite = clip_suite().to(torch.float32)
    by_torch = run_fast(suite, linear_kernel="torch")
    assert not calls
    by_onednn = run_fast(suite, linear_kernel="onednn", checkpoint_dir=str(tmp_path))
    assert calls
    assert_same(by_onednn.model, by_torch.model, bound=1e-5)
    for run, kernel in ((by_torch, TORCH), (by_onednn, ONEDNN)):
        (record,) = run.log.of_kind("engine")
        assert record["linear_kernel"] == kernel
        assert record["processor"] == kernels.processor()
    (tmp_path / "block-0001.safetensors").unlink()
    with pytest.raises(CalibrationError, match=r'linear_kernel \("onednn" then, "torch" now\)'):
        run_fast(suite, linear_kernel="torch", checkpoint_dir=str(tmp_path), resume=True)
    result = run_fast(suite, linear_kernel="onednn", checkpoint_dir=str(tmp_path), resume=True)
    assert_identical(result.model, by_onednn.model)
