"""On a GPU: the CPU's model, no waiting while tasks visit a block, features wherever they wait.

Deselected where there is no CUDA device.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, distance, run_fast
from test_streamed import calibrated, tensors_in_memory
from tiny_models import Suite, clip_suite, decoder_suite, t5_suite

from fusion_bench_featcal import CalibrationResult
from fusion_bench_featcal.rules.paper import PaperSums
from fusion_bench_featcal.streams.checks import Checks
from fusion_bench_featcal.streams.streams import Streams
from fusion_bench_featcal.streams.task_rows import AffineRows, LinearRows

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SUITES = {"clip": clip_suite, "llama": decoder_suite, "t5": t5_suite}
# RMS norms, rotary angles and T5's softmax are computed in float32 inside float64 models.
BOUNDS = {"clip": 1e-9, "llama": 2e-6, "t5": 2e-6}

VISITS: dict[Any, tuple[str, ...]] = {
    Streams: ("follow", "inputs_of", "advance"),
    LinearRows: ("add", "finished"),
    AffineRows: ("add", "finished"),
    PaperSums: ("add",),
    Checks: ("add",),
}
"""Work between two looks of the host at numbers."""


def run(suite: Suite, device: torch.device, **more: Any) -> CalibrationResult:
    """A calibration on a device of models that lie on the CPU."""
    return run_fast(suite, device=device, **more)


@pytest.mark.parametrize("name", SUITES)
def test_the_model_is_the_cpus(name: str):
    suite = SUITES[name]()
    found, wanted = (run(suite, device) for device in (GPU, torch.device("cpu")))
    assert distance(found.model, suite.merged) > 1e-3
    assert distance(found.model, wanted.model) < BOUNDS[name]
    places = [
        [(r.get("block"), r.get("task"), r.get("rows")) for r in result.log.records]
        for result in (found, wanted)
    ]
    assert places[0] == places[1]


@pytest.mark.parametrize("name", SUITES)
def test_nothing_waits_while_tasks_visit_a_block(name: str, monkeypatch: pytest.MonkeyPatch):
    def watched(work: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return work(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    suite = SUITES[name]()
    run(suite, GPU)  # libraries wait when they are used first
    for kind, names in VISITS.items():
        for name in names:
            monkeypatch.setattr(kind, name, watched(getattr(kind, name)))
    run(suite, GPU)


@pytest.mark.parametrize("name", SUITES)
def test_features_wait_anywhere_and_come_back_the_same(name: str):
    suite = SUITES[name]()
    wanted = run(suite, GPU, activations="device").model
    for place in ("host", "disk", "auto"):
        assert_identical(run(suite, GPU, activations=place).model, wanted)


@pytest.mark.parametrize("name", SUITES)
def test_one_block_of_a_model_in_files_is_on_the_device(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suite = SUITES[name]()
    wanted = run(suite, torch.device("cpu")).model
    with tensors_in_memory(monkeypatch) as outside:
        found = calibrated(suite, tmp_path, device=GPU, activations="host")
    assert outside == set()
    assert distance(found, wanted) < BOUNDS[name]
