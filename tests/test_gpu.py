"""On a GPU: the CPU's model, no synchronisation inside a block, features stored anywhere.

Deselected without a CUDA device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, distance, run_fast
from test_streamed import calibrated, tensors_in_memory
from tiny_models import Suite, clip_suite, decoder_suite, t5_suite

from fusion_bench_featcal.rules.paper import PaperSums
from fusion_bench_featcal.streams import Checks, Streams
from fusion_bench_featcal.streams.task_rows import AffineRows, LinearRows

pytestmark = pytest.mark.gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda")
# RMS norms, rotary angles and T5's softmax are computed in float32 inside float64 models.
SUITES: dict[str, tuple[Any, float]] = {
    "clip": (clip_suite, 1e-9), "llama": (decoder_suite, 2e-6), "t5": (t5_suite, 2e-6)
}  # fmt: skip
VISITS: dict[Any, tuple[str, ...]] = {  # work between two synchronisations
    Streams: ("follow", "inputs_of", "advance"),
    LinearRows: ("add", "finished"),
    AffineRows: ("add", "finished"),
    PaperSums: ("add",),
    Checks: ("add",),
}


@pytest.fixture(params=SUITES)
def case(request: pytest.FixtureRequest) -> tuple[Suite, float]:
    make, bound = SUITES[request.param]
    return make(), bound


def test_the_model_is_the_cpus_wherever_features_are_stored(case: tuple[Suite, float]):
    suite, bound = case
    result, expected = (run_fast(suite, device=device) for device in (GPU, CPU))
    assert distance(result.model, suite.merged) > 1e-3
    assert distance(result.model, expected.model) < bound
    logs = [result.log.records, expected.log.records]
    rows, right = [[(r.get("block"), r.get("task"), r.get("rows")) for r in log] for log in logs]
    assert rows == right
    on_device = run_fast(suite, device=GPU, activations="device").model
    for storage in ("host", "auto"):
        assert_identical(run_fast(suite, device=GPU, activations=storage).model, on_device)


def test_nothing_waits_while_tasks_visit_a_block(
    case: tuple[Suite, float], monkeypatch: pytest.MonkeyPatch
):
    def watched(work: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    run_fast(case[0], device=GPU)  # libraries wait when they are used first
    for kind, names in VISITS.items():
        for name in names:
            monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    run_fast(case[0], device=GPU)


def test_one_block_of_a_model_in_files_is_on_the_device(
    case: tuple[Suite, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suite, bound = case
    with tensors_in_memory(monkeypatch) as outside:
        model = calibrated(suite, tmp_path, device=GPU, activations="host")
    assert outside == set()
    assert distance(model, run_fast(suite).model) < bound
