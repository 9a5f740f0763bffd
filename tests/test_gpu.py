"""On a GPU: the CPU's model, no waiting while tasks visit a block, features wherever they wait.

Deselected where there is no CUDA device.
"""

from typing import Any

import pytest
import torch
from calibrations import assert_identical, distance, run_fast
from tiny_models import Suite, clip_suite, decoder_suite, t5_suite

from fusion_bench_featcal import CalibrationResult
from fusion_bench_featcal.engine import loop

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
SUITES = {"clip": clip_suite, "llama": decoder_suite, "t5": t5_suite}
# RMS norms, rotary angles and T5's softmax are computed in float32 inside float64 models.
BOUNDS = {"clip": 1e-9, "llama": 2e-6, "t5": 2e-6}


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
    for work in ("_collect", "_advance"):
        monkeypatch.setattr(loop.BlockLoop, work, watched(getattr(loop.BlockLoop, work)))
    run(suite, GPU)


@pytest.mark.parametrize("name", SUITES)
def test_features_wait_anywhere_and_come_back_the_same(name: str):
    suite = SUITES[name]()
    wanted = run(suite, GPU, activations="device").model
    for place in ("host", "disk", "auto"):
        assert_identical(run(suite, GPU, activations=place).model, wanted)


def test_seconds_are_those_of_the_gpu():
    log = run(clip_suite(), GPU).log
    for block in log.of_kind("block"):
        visits = [r["seconds"] for r in log.of_kind("task") if r["block"] == block["block"]]
        assert all(seconds > 0 for seconds in visits)
        assert sum(visits) <= 1.5 * block["seconds"]


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_fewer_bits_move_the_model_a_little(precision: str):
    suite = clip_suite()
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.float()
    exact, found = (run(suite, GPU, sums_precision=p).model for p in ("float32", precision))
    moved = distance(found, exact)
    assert moved < 0.02
    assert moved > 0 or precision == "tf32"  # products this small may not take the short cut
