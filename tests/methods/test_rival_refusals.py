"""Messages for settings, pools, models and features that methods cannot work with."""

from typing import Any

import pytest
import torch
from text_pools import NORMS, text_batch, text_pool
from tiny_models import clip_suite, normal
from tiny_pools import in_memory, projection_of, refusing, tiny_pool, tower
from tiny_texts import t5_model
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab import rivals

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("Surgery", {"rank": 0, "steps": 1.5}, r"rank must be an integer >= 1, got 0; method\.steps"),
    ("Surgery", {"stream": "train"}, r"method\.stream must be .*, got 'train'"),
    ("ProbSurgery", {"shared": True, "optimizer": "per_task"}, r"set method\.optimizer=joint"),
    ("RidgeSurgery", {"samples_per_task": 1}, r"ridge_lambda=auto.*method\.samples_per_task"),
    ("Distillation", {"ridge_lambda": 1}, r"method\.ridge_lambda is no setting of distillation"),
    ("SurgeryAlgorithm", {"base_metod": 1}, "'base_method'"),
]


@pytest.mark.parametrize(("kind", "keys", "message"), SETTINGS)
def test_settings(kind: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(rivals, kind)(**keys)


MEAN = {"base_method": {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}}
VAL = {"stream": "calibration", "calibration_split": "val"}
# Method and settings -> model and data that the pool lacks, and the message.
POOLS: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("Surgery", {}, "", 0, r"method\.stream=test_tta.*test_datasets\.one.*none"),
    ("Surgery", VAL, "", 10, r"calibration_split=val.*modelpool\.val_datasets\.one"),
    ("Surgery", {}, "_merged_", 10, r"modelpool\.models\._merged_"),
    ("RegMean", {}, "_pretrained_", 10, r"modelpool\.models\._pretrained_"),
]


@pytest.mark.parametrize(("kind", "keys", "absent", "tests", "message"), POOLS)
def test_pools_before_a_model_is_loaded(kind, keys, absent, tests, message, models) -> None:
    pool = tiny_pool({n: path for n, path in models.items() if n != absent}, test=tests)
    with pytest.raises(CalibrationError, match=message):
        getattr(rivals, f"{kind}Algorithm")(**keys).run(refusing(pool))


def test_language_models_that_cannot_be_corrected(tmp_path) -> None:
    pool = refusing(text_pool("causal", tmp_path))
    with pytest.raises(CalibrationError, match=r"has no ln_f: .*final_norm"):
        rivals.RidgeSurgeryAlgorithm(**MEAN, final_norm="ln_f").run(pool)
    with pytest.raises(CalibrationError, match="surgery_v2 corrects CLIP vision models, and"):
        rivals.SurgeryV2Algorithm(**MEAN).run(pool)


def test_samples_and_steps_of_distillation() -> None:
    suite = clip_suite()
    method = rivals.Distillation(samples_per_task=7, steps=5, learning_rate=1e300)
    with pytest.raises(CalibrationError, match=r"diverged.*method\.learning_rate \(now 1e\+300\)"):
        method.post_merge(suite.merged, in_memory(suite))
    suite.inputs["task_2"] = []
    with pytest.raises(CalibrationError, match="task task_2 has 0 calibration samples"):
        method.post_merge(suite.merged, in_memory(suite))
    with pytest.raises(CalibrationError, match="has no BatchNorm in its blocks"):
        rivals.BatchNormStatistics().post_merge(suite.merged, in_memory(suite))


def test_features_that_cannot_be_fitted() -> None:
    features = normal(0, 20, 6).float()
    surgery = rivals.Surgery(steps=5, learning_rate=1e30)
    with pytest.raises(CalibrationError, match="merged model's features are not"):
        surgery.fit(features * torch.nan, features, "a")
    with pytest.raises(CalibrationError, match=r"task 'a'.*method\.learning_rate \(now 1e\+30\)"):
        surgery.fit(features, 2 * features, "a")
    with pytest.raises(CalibrationError, match=r"task 'a' has 1 sample.*method\.samples_per_task"):
        rivals.RidgeSurgery().fit(features[:1], features[:1], "a")
    with pytest.raises(CalibrationError, match=r"task 'a'.*do not vary over 20 samples"):
        rivals.RidgeSurgery().fit(torch.ones(20, 6), features, "a")


def test_uses_of_corrected_models(models) -> None:
    module = rivals.SurgeryModule(normal(1, 3, 12).float(), normal(2, 12, 3).float())
    model = rivals.CorrectedModel(tower(models, "_merged_"), projection_of(models), {"one": module})
    with pytest.raises(CalibrationError, match=r"no feature correction.*for task 'three'.*one"):
        model.features("three", torch.rand(1, 3, 28, 28))
    with pytest.raises((CalibrationError, ValueError), match=r"holds no corrected model: .*_c"):
        rivals.CorrectedModel.from_pretrained(models["_merged_"])
    plain = t5_model(0).float()
    texts = rivals.CorrectedLanguageModel(plain, NORMS["seq2seq"], {"one": nn.Identity()})
    with pytest.raises(CalibrationError, match=r"no task is told.*for_task.*one"):
        texts(**text_batch("seq2seq"))
    with pytest.raises(ZeroDivisionError), texts.for_task("one"):
        raise ZeroDivisionError
    assert texts.task is None
