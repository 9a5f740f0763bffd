"""Evaluation multiplies float32 matrices with the library that calibration uses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusion_bench_featcal.core import kernels
from fusion_bench_featcal.fusionbench.evaluation import evaluate


@pytest.mark.skipif(not kernels.onednn_works(), reason="torch lacks the operator")
@pytest.mark.parametrize(
    ("setting", "calls"),
    [({}, 1), ({"linear_kernel": "onednn"}, 1), ({"linear_kernel": "torch"}, 0)],
)
def test_evaluation_follows_the_setting(
    setting: dict[str, Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "processor", lambda: kernels.SLOW_WITH_MKL)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    inputs, original, model = [], kernels._onednn_linear, nn.Linear(7, 4)

    def counted(x: Any, weight: Any, bias: Any = None) -> Any:
        inputs.append(x)
        return original(x, weight, bias)

    def measured(model: Any) -> dict[str, dict[str, float]]:
        with torch.no_grad():
            output = model(torch.ones(2, 3, 7))
        model(torch.ones(2, 7)).sum().backward()  # a task pool may train
        expected = model.weight.sum(1) + model.bias
        return {"cars": {"accuracy": float(torch.allclose(output, expected, atol=1e-5))}}

    monkeypatch.setattr(kernels, "_onednn_linear", counted)
    pool: Any = SimpleNamespace(evaluate=measured)
    evaluation = evaluate(pool, model, name="one", **setting)
    assert (evaluation.accuracy, evaluation.loss) == ({"cars": 1.0}, {"cars": None})
    assert len(inputs) == calls
    torch.testing.assert_close(model.weight.grad, torch.full((4, 7), 2.0))
