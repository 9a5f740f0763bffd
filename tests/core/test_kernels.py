"""Both libraries give the same result up to rounding, and each run chooses between them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, assert_same, run_fast
from tiny_models import clip_suite
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
from fusion_bench_featcal.run import problem

needs_onednn = pytest.mark.skipif(not kernels.onednn_works(), reason="torch lacks the operator")


def test_processes_agree_on_what_all_of_them_have():
    assert agreed_kernel([ONEDNN, TORCH]) == agreed_kernel([TORCH, TORCH]) == TORCH
    assert agreed_kernel([ONEDNN, ONEDNN]) == ONEDNN


@pytest.mark.parametrize(
    ("vendor", "capability", "has_mkl", "chosen"),
    [("AuthenticAMD", "AVX512", True, ONEDNN), ("AuthenticAMD", "AVX2", True, TORCH),
     ("AuthenticAMD", "AVX512", False, TORCH), ("GenuineIntel", "AVX512", True, TORCH),
     (None, "DEFAULT", False, TORCH)],
)  # fmt: skip
def test_the_choice_goes_by_the_processor(vendor, capability, has_mkl, chosen, monkeypatch):
    lines = "processor: 0\n" + (f"vendor_id\t: {vendor}\n" if vendor else "Features: asimd\n")
    monkeypatch.setattr(kernels.Path, "read_text", lambda *_, **__: lines)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: has_mkl)
    monkeypatch.setattr(kernels, "processor", kernels.processor.__wrapped__)
    monkeypatch.setattr(kernels, "onednn_works", lambda: True)
    assert choose_kernel(torch.device("cpu")) == chosen
    assert choose_kernel(torch.device("meta")) == TORCH


@needs_onednn
def test_large_products_are_added_in_strips(monkeypatch: pytest.MonkeyPatch):
    first, second = torch.randn(5, 7), torch.randn(3, 7)
    monkeypatch.setattr(products, "LARGEST_PRODUCT", 6)
    total = torch.ones(5, 3)
    with using_kernel(ONEDNN):
        products.add_product(total, first, second, 2.0)
    torch.testing.assert_close(total, 1 + 2 * first @ second.T)


@needs_onednn
def test_linear_maps_of_any_layout_and_dtype_are_right():
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(10)[::2]
    maps = [(x, weight, bias), (x, weight, bias[:1].expand(5)), (x, weight, torch.tensor(2.0)),
            (x, weight[0], None), (x[:, :0], weight[:, :0], bias),
            (x.double(), weight.double(), bias.double())]  # fmt: skip
    expected = [functional.linear(*tensors) for tensors in maps]
    with with_kernel(ONEDNN, lambda: torch.autocast("cpu", enabled=False))():
        result = [functional.linear(*tensors) for tensors in maps]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert functional.linear(*maps[0]).dtype == torch.bfloat16
    for pair in zip(result, expected, strict=True):
        torch.testing.assert_close(*pair)


@needs_onednn
def test_calibrations_agree_whatever_multiplies_and_resumed_ones_use_one_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suite, runs = clip_suite(tasks=2).to(torch.float32), []
    for kernel in (TORCH, ONEDNN):
        monkeypatch.setattr(problem, "choose_kernel", lambda _, kernel=kernel: kernel)
        folder: dict[str, Any] = {"checkpoint_dir": str(tmp_path)} if kernel == ONEDNN else {}
        runs.append(run_fast(suite, **folder))
        (record,) = runs[-1].log.of_kind("engine")
        assert record == {
            "kind": "engine", "linear_kernel": kernel, "processor": kernels.processor()
        }  # fmt: skip
    assert_same(runs[1].model, runs[0].model, bound=1e-5)
    (tmp_path / "block-0001.safetensors").unlink()
    monkeypatch.setattr(problem, "choose_kernel", lambda _: TORCH)
    with pytest.raises(CalibrationError, match="belongs to another run: "):
        run_fast(suite, checkpoint_dir=str(tmp_path), resume=True)
    monkeypatch.setattr(problem, "choose_kernel", lambda _: ONEDNN)
    result = run_fast(suite, checkpoint_dir=str(tmp_path), resume=True)
    assert_identical(result.model, runs[1].model)
