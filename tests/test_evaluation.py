"""Evaluation multiplies float32 matrices with the library that calibration uses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fusion_bench_featcal.core import kernels
from fusion_bench_featcal.fusionbench.evaluation import evaluate

needs_onednn = pytest.mark.skipif(not kernels.onednn_works(), reason="torch lacks the operator")


class LinearTaskPool:
    """Its accuracy is 1 if the model's output is right to rounding."""

    def evaluate(self, model: Any) -> dict[str, dict[str, float]]:
        with torch.no_grad():
            output = model(torch.ones(2, 3, 7))
        expected = model.weight.sum(1) + model.bias
        return {"cars": {"accuracy": float(torch.allclose(output, expected, atol=1e-5))}}


@pytest.fixture
def onednn_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Inputs of what goes to oneDNN; on a processor that it is for."""
    kernels.onednn_works()
    monkeypatch.setattr(kernels, "processor", lambda: kernels.SLOW_WITH_MKL)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    seen: list[Any] = []
    original = kernels._onednn_linear

    def counted(x: Any, weight: Any, bias: Any = None) -> Any:
        seen.append(x)
        return original(x, weight, bias)

    monkeypatch.setattr(kernels, "_onednn_linear", counted)
    return seen


@needs_onednn
@pytest.mark.parametrize(
    ("setting", "calls"),
    [({}, 1), ({"linear_kernel": "onednn"}, 1), ({"linear_kernel": "torch"}, 0)],
)
def test_evaluation_heeds_the_setting(
    setting: dict[str, str], calls: int, onednn_calls: list[Any]
) -> None:
    evaluation = evaluate(LinearTaskPool(), nn.Linear(7, 4), name="one", **setting)  # type: ignore[arg-type]
    assert len(onednn_calls) == calls
    assert evaluation.accuracy == {"cars": 1.0}
    assert evaluation.loss == {"cars": None}


@needs_onednn
def test_a_task_pool_that_trains_while_it_evaluates_gets_gradients(onednn_calls: list[Any]) -> None:
    class TrainingPool(LinearTaskPool):
        def evaluate(self, model: Any) -> dict[str, dict[str, float]]:
            model(torch.ones(2, 7)).sum().backward()
            return {"cars": {"accuracy": 1.0}}

    model = nn.Linear(7, 4)
    evaluate(TrainingPool(), model, name="one")  # type: ignore[arg-type]
    torch.testing.assert_close(model.weight.grad, torch.full((4, 7), 2.0))


def test_accuracies_and_losses_come_out_of_an_evaluation():
    report = {
        "model_info": {"all_params": 3},
        "cars": {"accuracy": 0.5, "loss": 1.0},
        "dtd": {"accuracy": 0.25},
        "average": {"accuracy": 0.375, "loss": 1.5},
    }
    pool: Any = SimpleNamespace(evaluate=lambda model: report)
    evaluation = evaluate(pool, nn.Identity(), name="one")
    assert evaluation.accuracy == {"cars": 0.5, "dtd": 0.25}
    assert evaluation.loss == {"cars": 1.0, "dtd": None}
