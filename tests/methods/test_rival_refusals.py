"""Messages for settings, pools, models and features that methods cannot work with."""

from typing import Any

import pytest
import torch
from tiny_models import clip_suite
from tiny_pools import in_memory, inputs_of, refusing, tiny_pool, tower
from tiny_texts import text_pool

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab import rivals

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("Surgery", {"rank": 0, "steps": 1.5}, r"rank must be an integer >= 1, got 0; method\.steps"),
    ("Surgery", {"stream": "train"}, r"method\.stream must be .*, got 'train'"),
    ("RidgeSurgery", {"samples_per_task": 1}, r"ridge_lambda=auto.*method\.samples_per_task"),
    ("Distillation", {"ridge_lambda": 1}, r"method\.ridge_lambda is unknown\. Known: "),
    ("ESM", {"scale": 0.0}, r"method\.scale must be a finite number > 0, got 0\.0"),
    ("ESM", {"polarisation": 1}, r"method\.polarisation is unknown.*polarization"),
    ("DCMerge", {"density": 2.0}, r"method\.density must be .* > 0 and at most 1, got 2\.0"),
    ("DCMerge", {"smoothing": "avg"}, r"method\.smoothing must be one of .*, got 'avg'"),
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
    ("Surgery", {}, "", 0, r"modelpool\.test_datasets\.one.*none"),
    ("Surgery", VAL, "", 10, r"modelpool\.val_datasets\.one"),
    ("Surgery", {}, "_merged_", 10, r"modelpool\.models\._merged_"),
    ("RegMean", {}, "_pretrained_", 10, r"modelpool\.models\._pretrained_"),
    ("DCMerge", {}, "_pretrained_", 10, r"_pretrained_\), which task vectors need: name it"),
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
    with pytest.raises(CalibrationError, match="surgery_v2 corrects no language models"):
        rivals.SurgeryV2Algorithm(**MEAN).run(pool)


def test_features_and_folders_that_are_unusable(models, tmp_path) -> None:
    with pytest.raises(CalibrationError, match=r"task 'a': .* do not vary"):
        rivals.RidgeSurgery().fit(torch.ones(4, 3), torch.randn(4, 3), "a")
    merged, pool = tower(models, "_merged_"), tiny_pool(models)
    next(merged.parameters()).data.fill_(torch.nan)
    with pytest.raises(CalibrationError, match=r"task one: .* not finite"):
        rivals.Surgery(steps=1, stream="calibration").post_merge(merged, inputs_of(pool))
    with pytest.raises(CalibrationError, match=r"corrections\.safetensors"):
        rivals.CorrectedModel.from_pretrained(tmp_path)


def test_training_that_diverges() -> None:
    suite = clip_suite()
    method = rivals.Distillation(samples_per_task=7, steps=5, learning_rate=1e300)
    with pytest.raises(CalibrationError, match=r"diverged.*method\.learning_rate \(now 1e\+300\)"):
        method.post_merge(suite.merged, in_memory(suite))
