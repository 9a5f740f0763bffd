"""Places, statistics, masks and samples of the smaller loop."""

from typing import Any

import pytest
import torch
from calibrations import (
    EXACT,
    assert_identical,
    assert_same,
    replay,
    run_slow,
    settings_of,
    with_rule,
)
from model_types import MIXTURES
from oracle import Knobs
from test_calibrate_convolutions import batched_suite
from tiny_convs import tower_suite
from tiny_models import Suite, clip_suite, decoder_suite, t5_suite
from torch import Tensor
from tricky_models import shares_sometimes, stack_suite

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus

RULES = {"paper": Paper(calibrate_norm=False), "plus": Plus()}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))


def run(suite: Suite, rule: Any, **more: Any) -> Any:
    settings = settings_of(Knobs(), suite, **{"family": suite.family, **more})
    return calibrate(
        suite.merged, suite.base, suite.experts, suite.inputs, with_rule(settings, rule)
    )


def tasks_of(result: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if k != "seconds"} for r in result.log.of_kind("task")]


@rules
@pytest.mark.parametrize("make", [clip_suite, t5_suite, decoder_suite, batched_suite])
def test_no_bit_depends_on_the_place(make: Any, rule: Any, tmp_path: Any):
    suite = make()
    here = run(suite, rule, held_out=1)
    there = run(suite, rule, held_out=1, activations="disk", activations_dir=str(tmp_path))
    assert_identical(there.model, here.model)
    assert tasks_of(there) == tasks_of(here) and not list(tmp_path.iterdir())


@rules
@pytest.mark.parametrize("make", [batched_suite, lambda: tower_suite("resnet")])
def test_statistics_are_those_of_the_calibrated_models_own_features(make: Any, rule: Any):
    suite = make()
    model, received = run(suite, rule).model, dict[str, list[Tensor]]()
    norms = {n: m for n, m in model.named_modules() if "BatchNorm" in type(m).__name__}
    for name, norm in norms.items():
        inputs = received.setdefault(name, [])
        norm.register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.append(args[0]))
    for batches in suite.inputs.values():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    for name, norm in norms.items():
        x = torch.cat(received[name]).movedim(1, 0).flatten(1)  # tasks have equally many rows
        torch.testing.assert_close(norm.running_mean, x.mean(1))
        torch.testing.assert_close(norm.running_var, x.var(1, unbiased=False))
        merged: Any = suite.merged.get_submodule(name)
        assert torch.equal(norm.weight, merged.weight) and torch.equal(norm.bias, merged.bias)
        assert not torch.equal(norm.running_mean, merged.running_mean)


@rules
def test_merged_statistics_can_be_kept(rule: Any):
    suite = batched_suite()
    result = run(suite, rule, batch_norm="merged")
    for name, buffer in result.model.named_buffers():
        assert torch.equal(buffer, suite.merged.get_buffer(name))
    left = [record["left"] for record in result.log.of_kind("block")]
    assert left == [["layers.0.norm"], ["layers.1.norm"]]


@pytest.mark.parametrize("family", ["auto", "replay"])
def test_weights_of_tokens_equal_the_oracles(family: str):
    suite, knobs = clip_suite(), Knobs(demo_last_block=True)
    more: Any = {"family": replay(suite)} if family == "replay" else {}
    found = run(suite, Paper(eps=knobs.eps), token_weights="demo_last_block", **more).model
    assert_same(found, run_slow(suite, knobs).model, EXACT)


def test_experts_of_mixtures_stay_as_merged_with_one_note(caplog: pytest.LogCaptureFixture):
    suite = MIXTURES[0].suite()
    assert suite is not None
    found = run(suite, Paper(), modules=None)
    notes = [r.getMessage() for r in caplog.records if "stay as merged" in r.getMessage()]
    assert len(notes) == 1 and notes[0].startswith("the experts of 2 mixtures stay as merged")
    for name, value in found.model.named_parameters():
        same = torch.equal(value, suite.merged.get_parameter(name))
        is_mixture = ".experts." in name or name.endswith(".gate.weight")
        assert same if is_mixture else same != name.endswith("_proj.weight")


@rules
def test_inputs_that_are_shared_sometimes_are_refused(rule: Any):
    suite = stack_suite(shares_sometimes, sizes=(7,), seed=2)
    (whole,) = suite.inputs["task_1"]
    suite.inputs["task_1"] = list(whole.split([5, 2]))
    message = r"task task_1, block .*first.*first batch.*method\.modules=\['!"
    with pytest.raises(CalibrationError, match=message):
        run(suite, rule)


@rules
def test_copies_and_held_out_samples_are_counted(rule: Any):
    suite = clip_suite(tasks=2, sizes=(8,))
    first = tasks_of(run(suite, rule, held_out=2, augment="jitter", samples_per_task=8))[0]
    assert (first["samples"], first["held_out"]) == (8, 2)
    assert first["held_out_cosine"] > first["held_out_cosine_merged"] - 1
