"""Methods on encoders without a head: the corrected and distilled feature is the embedding."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from encoder_pools import encoder, encoder_pool, rows
from rivals import DRAW, improved
from tiny_models import normal
from tiny_pools import assert_equal, inputs_of, refusing
from tiny_texts import TASKS, word_tokenizer
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
EPS = torch.finfo(torch.float32).eps
KINDS = pytest.mark.parametrize("kind", ["bert", "dino"])


def batch_of(pool: Any, task: str = TASKS[0]) -> Any:
    """All of a task's samples, of unequal length."""
    settings = FeatCalSettings(batch_size=12)
    (batch,) = inputs_of(pool).batches(settings)[task]
    return batch


def pooling_of(pool: Any) -> Pooling:
    """The pooling that a pool's base declares."""
    pooling = inputs_of(pool).pooling
    assert pooling is not None
    return pooling


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
    batch = batch_of(encoder_pool("bert", tmp_path))
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
def test_ridge_surgery_reaches_the_experts_embeddings_of_few_samples(kind, tmp_path) -> None:
    """An affine map of d features fits d + 1 samples."""
    pool, merged = encoder_pool(kind, tmp_path), encoder(kind, 3)
    method, model = improved("RidgeSurgery", inputs_of(pool), merged, ridge_lambda=0.0, **DRAW)
    for task in TASKS:
        expert, (affine,) = pool.load_model(task).eval(), model.correction(task)
        for batch in method.batches(inputs_of(pool))[task]:
            features = pooling_of(pool).features(merged, batch)
            target = alone(expert, batch, "mean" if kind == "bert" else "cls")[-1]
            terms = features.abs() @ affine.matrix.abs().T + affine.shift.abs() + features.abs()
            atol = 4 * WIDTH * EPS * float(terms.max())
            torch.testing.assert_close(model.features(task, **batch), target, rtol=0, atol=atol)


@KINDS
def test_surgery_v2_compares_token_means_without_padding(kind, tmp_path) -> None:
    pool, merged = encoder_pool(kind, tmp_path), encoder(kind, 3)
    settings: dict[str, Any] = DRAW | {"stream": "test_tta", "steps": 1, "batch_size": 12}
    method, model = improved("SurgeryV2", inputs_of(pool), merged, **settings)
    mode, identity = "mean" if kind == "bert" else "cls", [nn.Identity()] * 3
    for task in TASKS:
        (batch,) = method.batches(inputs_of(pool))[task]
        sides = alone(merged, batch, mode), alone(pool.load_model(task).eval(), batch, mode)
        expected = sum(float((a - b).abs().mean()) for a, b in zip(*sides, strict=True))
        assert model.curves[task][0] == (0, pytest.approx(expected, rel=1e-5))
        wider = {name: nn.functional.pad(t, (0, 2)) for name, t in batch.items()}  # padding
        for inputs in [batch, wider] if kind == "bert" else [batch]:
            features = all_features(merged, pooling_of(pool), identity, inputs)
            for feature, plain in zip(features, sides[0], strict=True):
                torch.testing.assert_close(feature, plain, rtol=1e-4, atol=1e-5)


@KINDS
def test_distillation_is_towards_the_embeddings(kind, tmp_path) -> None:
    pool, merged = encoder_pool(kind, tmp_path), encoder(kind, 3)
    settings = DRAW | {"steps": 1, "batch_size": 12}
    _, model = improved("Distillation", inputs_of(pool), encoder(kind, 3), **settings)
    mode = "mean" if kind == "bert" else "cls"
    for task in TASKS:
        drawn: dict[str, Any] = DRAW | {"batch_size": 12}
        batches = inputs_of(pool).batches(FeatCalSettings(**drawn))
        (batch,) = batches[task]
        far, target = (alone(m, batch, mode)[-1] for m in (merged, pool.load_model(task).eval()))
        loss = float((far - target).square().mean() / target.square().mean())
        assert model.curves[task][0] == (0, pytest.approx(loss, rel=1e-4))


def test_texts_are_cut_where_embeddings_are(tmp_path) -> None:
    inputs = inputs_of(encoder_pool("bert", tmp_path, length=3))
    (batch,) = inputs.batches(FeatCalSettings(batch_size=12))[TASKS[0]]
    assert batch["input_ids"].shape == (12, 3)
    settings = FeatCalSettings(batch_size=12, max_length=2)
    (batch,) = inputs.batches(settings)[TASKS[0]]
    assert batch["input_ids"].shape == (12, 2)
    lengths = [len(word_tokenizer()(row["text"])["input_ids"]) for row in rows("bert", TASKS[0])]
    assert max(lengths) > 3


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
