"""`calibrate` as a user of plain torch calls it: four models and batches, no settings."""

import copy
import dataclasses
import importlib
import logging
import re
import sys
from typing import Any

import pytest
import torch
from model_types import suite_named
from tiny_convs import tower_suite
from tiny_models import Stack as Net
from tiny_models import Suite, decoder_suite, listed, residual_suite, samples_by_task
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, Paper, Plus, calibrate
from fusion_bench_featcal.families import Stack
from fusion_bench_featcal.run.log import UNLIKE_SAMPLES


def arguments(suite: Suite) -> tuple[Any, Any, Any, Any]:
    return suite.merged, suite.base, suite.experts, suite.inputs


def bert() -> Suite:
    return suite_named("bert")


@pytest.mark.parametrize("make", [bert, decoder_suite, residual_suite])
def test_models_and_batches_are_enough(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    suite = make()
    with caplog.at_level(logging.WARNING):
        result = calibrate(*arguments(suite))
    # All samples are used, as asked. Experts that differ by noise fit none of them.
    assert {*caplog.messages} <= {UNLIKE_SAMPLES}
    samples = {r["task"]: r["samples"] for r in result.log.select("task")}
    sizes = {task: sum(len(next(iter(b.values())) if isinstance(b, dict) else b) for b in batches)
             for task, batches in suite.inputs.items()}  # fmt: skip
    assert samples == sizes
    text = str(result)
    assert text.startswith(f"calibrated {len(result.log.select('block'))} blocks in ")
    assert all(f"{task} {drift:.3g}" in text for task, drift in result.log.final_drift.items())
    assert list(result.log.final_drift) == list(suite.inputs)
    settings = FeatCalSettings.plus(samples_per_task=max(sizes.values()))
    expected = calibrate(*arguments(suite), settings, progress=False).model
    for name, parameter in expected.named_parameters():
        assert torch.equal(result.model.get_parameter(name), parameter)


def test_options_are_keywords_and_settings_are_not_needed() -> None:
    suite = residual_suite(sizes=(9, 6))
    few = calibrate(*arguments(suite), Paper(), samples_per_task=7, progress=False)
    assert {record["samples"] for record in few.log.select("task")} == {7}
    named = calibrate(*arguments(suite), Paper(), family=suite.blocks, progress=False)
    whole = calibrate(*arguments(suite), Paper(), progress=False)
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(named.model.get_parameter(name), parameter)
    with pytest.raises(ValueError, match=r"samples_per_task must be .* >= 1, got 0"):
        calibrate(*arguments(suite), samples_per_task=0)
    with pytest.raises(Exception, match="no block 'layers\\.7'"):
        calibrate(*arguments(suite), family=["layers.0", "layers.7"])


def test_an_error_in_a_familys_code_is_not_blamed_on_token_ids() -> None:
    class Broken(Stack):
        def begin(self, *args: Any, **kwargs: Any) -> Any:
            return [][0]

    suite = residual_suite()
    family = Broken("|".join(suite.blocks), compared=False)
    with pytest.raises(IndexError, match="list index out of range"):
        calibrate(*arguments(suite), family=family, progress=False)


# --- careless use, and what would be wrong in silence ---


class Again(Net):
    """Its last block runs twice."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in [*self.layers, self.layers[-1]]:
            hidden = layer(hidden)
        return self.head(hidden)


def again(suite: Suite) -> None:
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.__class__ = Again


def deeper(suite: Suite) -> None:
    expert: Any = suite.experts["task_1"]
    expert.layers.append(copy.deepcopy(expert.layers[0]))


CARELESS: list[Any] = [
    (again, r"it runs \['layers.0', 'layers.1', 'layers.2', 'layers.2'\], not each .* once"),
    (deeper, r"experts\['task_1'\] has the block layers.3, which the merged model lacks"),
    (lambda s: s.inputs.update(task_1=[*s.inputs["task_1"], torch.ones(4)]),
     r"batches\['task_1'\]\[2\] has 1 dimensions, but the first batch has 2: .* sample\[None\]"),
    (lambda s: s.inputs.update(task_1=[torch.ones(0, 4)]),
     r"batches\['task_1'\]\[0\] must be .* at least one sample; got tensor\(\[\], size=\(0, 4\)\)"),
    (lambda s: s.inputs.update(task_1=[{"x": [[1.0, 2.0]]}]), r"got {'x': \[\[1.0, 2.0\]\]}"),
    (lambda s: s.inputs.update(task_0=[(torch.ones(3, 4), torch.ones(3))] * 2),
     r"task task_0: Stack.forward fails on a batch \(TypeError: .* leave labels out"),
    (lambda s: setattr(s, "experts", list(s.experts)), "experts must map names of tasks"),
    (lambda s: setattr(s, "merged", "merged"), "merged must be a torch.nn.Module, not 'merged'"),
    (lambda s: setattr(s.experts["task_0"], "merge_and_unload", print),
     r"experts\['task_0'\]: a Stack has an adapter: give model.merge_and_unload"),
    (lambda s: setattr(s, "family", ["layers"]), r"Stack runs \[\], not each of \['layers'\]"),
    (lambda s: setattr(s, "family", ["layers.0", "layers.0"]), "or it is named twice"),
    (lambda s: setattr(s, "family", ["layers.0", "layers.2"]), "another module.* runs between"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "message"), CARELESS)
def test_careless_models_and_batches_are_refused(spoil: Any, message: str) -> None:
    suite = dataclasses.replace(residual_suite(sizes=(9, 6)), family="auto")
    spoil(suite)
    with pytest.raises((CalibrationError, TypeError), match=message):
        calibrate(*arguments(suite), family=suite.family, progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Paper(mix_alpha=5), "mix_alpha must be a finite number >= 0 and at most 1, got 5"),
        (lambda: Paper(anchor_rho=float("nan")), "anchor_rho must be a finite number, got nan"),
        (lambda: Plus(gamma=-1), "gamma must be a finite number >= 0, got -1"),
        (lambda: Plus(ridges=()), "ridges must be at least one number"),
        (lambda: Plus(task_weights={"a": 0}), r"task_weights\['a'\] must be a finite number >"),
        (lambda: Plus(far="x"), "far must be a finite number >= 0, got 'x'"),  # type: ignore[arg-type]
    ],
)
def test_numbers_of_rules_are_checked(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_options_beside_settings_are_refused() -> None:
    with pytest.raises(TypeError, match="seed: set it in the settings"):
        calibrate(*arguments(residual_suite()), FeatCalSettings(), seed=7)


@pytest.mark.parametrize("make", [residual_suite, decoder_suite])
def test_a_base_that_is_not_the_base_is_named(make: Any, caplog: Any) -> None:
    suite, other = make(), make(seed=5)
    copied = dict(suite.experts, task_0=copy.deepcopy(other.base))
    changed = dataclasses.replace(suite, base=other.base, experts=copied)
    calibrate(*arguments(changed), progress=False)
    notes = [r.getMessage() for r in caplog.records]
    assert notes[0].startswith("experts['task_0'] equals the base on a sample of its weights")
    away = (
        r"experts\['task_1'\] may not be fine-tuned from this base: .* 1\.\d+ times the base's norm"
    )
    assert re.match(away, notes[1]) and notes[2].startswith("merged may not be fine-tuned")
    assert len(notes) == 3
    caplog.clear()
    calibrate(*arguments(changed)[:1], None, *arguments(changed)[2:], progress=False)
    assert not caplog.records  # a base that is not read


def test_a_device_that_torch_cannot_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^device=cuda:99"):
        calibrate(*arguments(residual_suite()), device="cuda:99")


def test_frozen_statistics_stay_as_merged(caplog: pytest.LogCaptureFixture) -> None:
    suite = tower_suite("resnet")
    for name, buffer in suite.merged.named_buffers():
        for expert in suite.experts.values():
            expert.get_buffer(name).copy_(buffer)
    result = calibrate(*arguments(suite), progress=False)
    assert re.search(r"the experts share the statistics of \d+ BatchNorms", caplog.text)
    for name, buffer in result.model.named_buffers():
        assert torch.equal(buffer, suite.merged.get_buffer(name))
    # One of its own is enough to estimate that statistic for the mixture.
    own = next(name for name, _ in suite.merged.named_buffers() if "stages.1" in name)
    suite.experts["task_0"].get_buffer(own).add_(1)
    changed = calibrate(*arguments(suite), progress=False).model.get_buffer(own)
    assert not torch.equal(changed, suite.merged.get_buffer(own))


def test_attention_of_torch_is_left_as_merged_without_a_setting() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    inputs: Any = samples_by_task(2, (6, 4), 5, 8, seed=0)
    suite = listed(encoder, inputs, ["layers.0", "layers.1"], 1)
    result = calibrate(*arguments(suite), family=["layers.0", "layers.1"], progress=False)
    changed = {
        name.split(".")[2]
        for name, parameter in result.model.named_parameters()
        if not torch.equal(parameter, suite.merged.get_parameter(name))
    }
    assert changed == {"linear1", "linear2"}


def test_labels_of_another_length_and_models_without_weights_are_named() -> None:
    suite = decoder_suite()
    suite.inputs["task_0"][0]["labels"] = torch.zeros(
        len(suite.inputs["task_0"][0]["input_ids"]), 3, dtype=torch.int64
    )
    with pytest.raises(CalibrationError, match=r"task task_0: labels have the shape .* -100"):
        calibrate(*arguments(suite), progress=False)
    suite = residual_suite()
    suite.experts["task_1"].to("meta")
    with pytest.raises(CalibrationError, match=r"experts\['task_1'\]: a Stack is on the meta"):
        calibrate(*arguments(suite), progress=False)
    suite.merged.to("meta")
    with pytest.raises(CalibrationError, match=r"^a Stack is on the meta device"):
        calibrate(*arguments(suite), progress=False)


def test_encoders_without_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sentence_transformers", "sklearn"):
        monkeypatch.setitem(sys.modules, name, None)
    rooms = ("fusion_bench_featcal.encoders", "fusion_bench_featcal.sentence_transformers")
    for name in [name for name in sys.modules if name.startswith(rooms)]:
        monkeypatch.delitem(sys.modules, name)
    advice = r"^needs sentence-transformers 6.2 .*'\.\[encoders\]' in a checkout"
    with pytest.raises(ImportError, match=advice):
        importlib.import_module("fusion_bench_featcal.sentence_transformers")


def test_the_head_never_runs() -> None:
    """Logits of a large vocabulary are by far larger than all that a calibration needs."""
    suite, runs = decoder_suite(), list[Any]()
    for model in (suite.merged, suite.base, *suite.experts.values()):
        model.get_submodule("lm_head").register_forward_hook(lambda *call: runs.append(call))
    calibrate(*arguments(suite), progress=False)
    assert not runs


def test_the_order_of_a_batchs_tensors_says_nothing_and_vectors_are_inputs() -> None:
    suite = decoder_suite()
    for batches in suite.inputs.values():
        for batch in batches:
            batch["sizes"] = torch.ones(len(batch["input_ids"]))
        batches[1:] = [dict(reversed(batch.items())) for batch in batches[1:]]
    record = calibrate(*arguments(suite), progress=False).log.select("task")[0]
    assert record["samples"] == sum(len(batch["input_ids"]) for batch in suite.inputs["task_0"])
    for batch in suite.inputs["task_0"]:
        del batch["attention_mask"]  # without padding every value is checked
    suite.inputs["task_0"][0]["sizes"][1] = torch.nan
    with pytest.raises(CalibrationError, match="sample 1, input 'sizes', has NaN"):
        calibrate(*arguments(suite), progress=False)
