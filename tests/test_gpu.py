"""On a GPU: the CPU's model, wherever features are stored. Deselected without a CUDA device."""

from typing import Any

import pytest
import torch
from calibrations import assert_identical, distance, run_fast
from test_streamed import calibrated, tensors_in_memory
from tiny_models import Suite, clip_suite, decoder_suite, t5_suite

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# RMS norms, rotary angles and T5's softmax are computed in float32 inside float64 models.
SUITES: dict[str, tuple[Any, float]] = {
    "clip": (clip_suite, 1e-9), "llama": (decoder_suite, 2e-6), "t5": (t5_suite, 2e-6)
}  # fmt: skip


@pytest.fixture(params=SUITES)
def case(request: pytest.FixtureRequest) -> tuple[Suite, float]:
    make, bound = SUITES[request.param]
    return make(), bound


def test_the_model_is_the_cpus_wherever_features_are_stored(case: tuple[Suite, float]):
    suite, bound = case
    result, expected = (run_fast(suite, device=device) for device in (GPU, CPU))
    assert distance(result.model, suite.merged) > 1e-3
    assert distance(result.model, expected.model) < bound
    on_device = run_fast(suite, device=GPU, activations="device").model
    for storage in ("host", "auto"):
        assert_identical(run_fast(suite, device=GPU, activations=storage).model, on_device)


def test_one_block_of_a_model_in_files_is_on_the_device(case, tmp_path, monkeypatch) -> None:
    suite, bound = case
    with tensors_in_memory(monkeypatch) as outside:
        model = calibrated(suite, tmp_path, device=GPU, activations="host")
    assert outside == set()
    assert distance(model, run_fast(suite).model) < bound
