"""Methods on encoders without a head: the corrected and distilled feature is the embedding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from encoder_pools import encoder, encoder_pool
from rivals import DRAW, improved
from tiny_models import normal
from tiny_pools import assert_equal, inputs_of, refusing
from tiny_texts import TASKS
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.data.embeddings import MODES, Pooling
from fusion_bench_featcal.lab import rivals
from fusion_bench_featcal.lab.rivals.corrected_model import (
    AffineModule,
    CorrectedModel,
    SurgeryModule,
    all_features,
)

WIDTH = 16
KINDS = pytest.mark.parametrize("kind", ["bert", "dino"])


@torch.no_grad()
def alone(model: nn.Module, batch: Any, mode: str) -> list[Tensor]:
    """Token means after each block and the embedding, `[items, d]`: every item without padding."""
    results = []
    for item in range(len(next(iter(batch.values())))):
        inputs = {name: tensor[item : item + 1] for name, tensor in batch.items()}
        if (mask := inputs.get("attention_mask")) is not None:
            inputs = {name: tensor[:, mask[0] > 0] for name, tensor in inputs.items()}
        output: Any = model(**inputs, output_hidden_states=True)
        states = output.last_hidden_state[0]
        embedding = states.mean(0) if mode == "mean" else states[0]
        results.append([*(block[0].mean(0) for block in output.hidden_states[1:]), embedding])
    return [torch.stack(feature) for feature in zip(*results, strict=True)]


@pytest.mark.parametrize("mode", MODES)
def test_without_a_correction_features_are_the_merged_models(mode, tmp_path) -> None:
    model, pooling = encoder("bert", 3), Pooling(mode)
    inputs = inputs_of(encoder_pool("bert", tmp_path))
    (batch,) = inputs.batches(FeatCalSettings(batch_size=12))[TASKS[0]]  # of unequal length
    zeros = [SurgeryModule(normal(n, 2, WIDTH).float(), torch.zeros(WIDTH, 2)) for n in range(3)]
    expected = pooling.features(model, batch)
    for corrections in (zeros, zeros[2:]):
        corrected = CorrectedModel(model, {"one": corrections}, pooling)
        assert torch.equal(corrected.features("one", **batch), expected)
        assert torch.equal(corrected(**batch).last_hidden_state, model(**batch).last_hidden_state)
    shift = AffineModule(torch.zeros(WIDTH, WIDTH), normal(5, WIDTH).float())
    corrected = CorrectedModel(model, {"one": [shift]}, pooling)
    assert torch.equal(corrected.features("one", **batch), expected - shift.shift)
    corrected.save_pretrained(tmp_path / "saved")
    assert CorrectedModel.from_pretrained(tmp_path / "saved").site == pooling


@KINDS
def test_training_starts_at_the_distance_of_embeddings_without_padding(kind, tmp_path) -> None:
    """SurgeryV2 compares token means behind every block too, Distillation relative squares."""
    inputs: Any = inputs_of(encoder_pool(kind, tmp_path))
    mode = "mean" if kind == "bert" else "cls"
    one: dict[str, Any] = DRAW | {"batch_size": 12, "steps": 1}
    merged, identity = encoder(kind, 3), [nn.Identity()] * 3
    method, corrected = improved("SurgeryV2", inputs, merged, stream="test_tta", **one)
    _, distilled = improved("Distillation", inputs, encoder(kind, 3), **one)
    train = inputs.batches(FeatCalSettings(samples_per_task=8, batch_size=12))
    for task in TASKS:
        (test,), expert = method.batches(inputs)[task], inputs.modelpool.load_model(task).eval()
        sides = alone(merged, test, mode), alone(expert, test, mode)
        expected = sum(float((a - b).abs().mean()) for a, b in zip(*sides, strict=True))
        assert corrected.curves[task][0] == (0, pytest.approx(expected, rel=1e-5))
        wider = {name: nn.functional.pad(t, (0, 2)) for name, t in test.items()}  # padding
        for batch in [test, wider] if kind == "bert" else [test]:
            features = all_features(merged, inputs.pooling, identity, batch)
            for feature, plain in zip(features, sides[0], strict=True):
                torch.testing.assert_close(feature, plain, rtol=1e-4, atol=1e-5)
        (drawn,) = train[task]
        far, target = (alone(model, drawn, mode)[-1] for model in (merged, expert))
        loss = float((far - target).square().mean() / target.square().mean())
        assert distilled.curves[task][0] == (0, pytest.approx(loss, rel=1e-4))


def test_texts_are_cut_where_embeddings_are(tmp_path) -> None:
    inputs = inputs_of(encoder_pool("bert", tmp_path, length=3))
    for settings, length in ((FeatCalSettings(), 3), (FeatCalSettings(max_length=2), 2)):
        (batch,) = inputs.batches(settings.replace(batch_size=12))[TASKS[0]]
        assert batch["input_ids"].shape == (12, length)  # of longer texts


def test_texts_without_a_pooling_are_refused_unless_the_task_pool_has_one(tmp_path) -> None:
    pool = encoder_pool("bert", tmp_path)
    (tmp_path / "pretrained" / "modules.json").unlink()
    for kind in ("RidgeSurgery", "SurgeryV2"):
        with pytest.raises(CalibrationError, match=r"corrects no classifiers: .*modules\.json"):
            getattr(rivals, kind)(stream="calibration").check(inputs_of(refusing(pool)))
    inputs = inputs_of(pool)
    inputs.taskpool = SimpleNamespace(pooling=Pooling("max"))
    _, model = improved("RidgeSurgery", inputs, encoder("bert", 3), **DRAW)
    assert model.site == Pooling("max")


def test_a_chain_is_its_methods_in_turn(tmp_path) -> None:
    inputs = inputs_of(encoder_pool("bert", tmp_path))
    parts = [{"_target_": f"fusion_bench_featcal.lab.rivals.{kind}", **DRAW}
             for kind in ("FeatCal", "RidgeSurgery")]  # fmt: skip
    method, model = improved("Chain", inputs, encoder("bert", 3), methods=parts)
    _, first = improved("FeatCal", inputs, encoder("bert", 3), **DRAW)
    single, expected = improved("RidgeSurgery", inputs, first, **DRAW)
    assert_equal(model, expected)
    assert method.samples(TASKS) == single.samples(TASKS)
    assert method.added(model) == single.added(expected)
    assert method.settings["methods"] == ["featcal", "ridge_surgery"]
    assert method.settings.items() >= single.settings.items()
    for methods, message in (([], r"method\.methods must be"), ([parts[0] | {"x": 1}], "x is unk")):
        with pytest.raises(Exception, match=message):
            rivals.Chain(methods=methods)
