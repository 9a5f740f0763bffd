"""Properties and refusals of every rival. A new rival is a row of `RIVALS`."""

import copy
import json
from functools import cache
from typing import Any

import pytest
import torch
from encoder_pools import encoder_pool
from rivals import DRAW, applied
from tiny_models import clip_suite
from tiny_pools import assert_equal, in_memory, inputs_of, refusing, tiny_pool, tower
from tiny_texts import text_pool

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab import rivals

TRAINED = DRAW | {"steps": 3}
ANSWERS = TRAINED | {"generated_tokens": 4}
OURS = TRAINED | {"stream": "calibration"}
# Class in `lab.rivals` -> settings that make it short.
RIVALS: dict[str, dict[str, Any]] = {
    "FeatCal": DRAW, "Distillation": TRAINED, "RegMean": DRAW, "RegMeanPlusPlus": DRAW, "Lot": DRAW,
    "ESM": DRAW, "DCMerge": {"density": 0.1}, "RidgeSurgery": DRAW, "Surgery": OURS,
    "ProbSurgery": OURS | {"hidden": 5}, "SurgeryV2": OURS | {"rank": 2}, "HARC": DRAW,
    "SWUDI": {"time": 5.0}, "LARV": {"over": "task_arithmetic"}, "ReACT": DRAW,
    "SeqKD": ANSWERS, "MOPD": ANSWERS,
}  # fmt: skip
CASES = [
    *((kind, "clip") for kind in RIVALS if kind not in ("HARC", "SeqKD", "MOPD")),
    ("HARC", "mixture"),
    *((kind, "causal") for kind in ("Distillation", "Surgery", "MOPD")),
    *((kind, "seq2seq") for kind in ("ESM", "ProbSurgery", "RidgeSurgery", "ReACT", "SeqKD")),
    *(
        pytest.param(kind, "bert", marks=[pytest.mark.slow, pytest.mark.ci])  # imports for seconds
        for kind in ("FeatCal", "DCMerge", "Distillation", "SurgeryV2")
    ),
]


@pytest.fixture(scope="module")
def pool_of(models, tmp_path_factory) -> Any:
    """Pool of a kind of models."""

    def make(setup: str) -> Any:
        if setup == "clip":
            return tiny_pool(models)
        folder = tmp_path_factory.mktemp(setup)
        if setup == "bert":
            pytest.importorskip("sentence_transformers", "6.2", reason="extra `encoders`")
        return encoder_pool(folder) if setup == "bert" else text_pool(setup, folder)

    return cache(make)


def merged_model(pool: Any) -> Any:
    name = "_merged_" if "_merged_" in pool.all_model_names else "_pretrained_"
    return pool.load_model(name).eval()


@pytest.fixture(scope="module")
def fitted(pool_of) -> Any:
    """A rival and its result on a pool, fitted once."""

    def fit(kind: str, setup: str) -> Any:
        pool = pool_of(setup)
        return applied(kind, inputs_of(pool), merged_model(pool), **RIVALS[kind])

    return cache(fit)


@pytest.mark.parametrize(("kind", "setup"), CASES)
def test_a_model_is_finite_described_and_survives_saving(kind, setup, fitted, pool_of, tmp_path):
    (method, result), pool, few = fitted(kind, setup), pool_of(setup), RIVALS[kind]
    model = result.model
    tasks, merged = list(pool.model_names), merged_model(pool)
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert_equal(loaded, model)
    if hasattr(model, "corrections"):
        assert_equal(model.model, merged)
        names = ("tasks", "final_norm", "projection")
        assert all(str(getattr(loaded, n)) == str(getattr(model, n)) for n in names)
        with pytest.raises(OSError, match="no file named"):  # without its corrections
            type(model.model).from_pretrained(tmp_path)
    with_samples = tasks if "samples_per_task" in few else []
    used = {task: {"samples": 8, "split": "train"} for task in with_samples}
    assert method.samples(result) == used
    corrections = getattr(model, "corrections", torch.nn.Module())
    assert sum(method.added(model).values()) == sum(p.numel() for p in corrections.parameters())
    assert json.loads(json.dumps(method.settings)).items() >= few.items()
    assert method.calibration_settings.batch_size == method.settings.get("batch_size", "auto")


@pytest.mark.parametrize("kind", ["ESM", "RidgeSurgery", "Surgery"])
def test_its_algorithm_repeats_it_without_labels_and_leaves_experts(kind, fitted, models) -> None:
    """Labels of images and the test split play no part."""
    is_merger = hasattr(getattr(rivals, kind), "merge")
    pool = tiny_pool({n: path for n, path in models.items() if n != "_merged_" or not is_merger})
    pool._models = {name: pool.load_model(name).eval() for name in pool._models}
    before, images = copy.deepcopy(pool._models), pool.load_train_dataset
    pool.load_train_dataset = lambda task: [row | {"label": 7} for row in images(task)]
    pool.load_test_dataset = lambda task: pytest.fail("test data was read")
    clip_model = {"clip_model": models["_pretrained_"]} if "Surgery" in kind else {}
    result = getattr(rivals, f"{kind}Algorithm")(**RIVALS[kind], **clip_model).run(pool)
    assert_equal(result, fitted(kind, "clip")[1].model)
    for name in set(before) - {"_merged_"}:  # that one is improved in place
        assert_equal(pool._models[name], before[name])


# ---- refusals

SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("Surgery", {"rank": 0, "steps": 1.5}, r"rank must be an integer >= 1, got 0; steps"),
    ("Surgery", {"stream": "train"}, r"stream must be .*, got 'train'"),
    ("RidgeSurgery", {"samples_per_task": 1}, r"ridge_lambda=auto.*method\.samples_per_task"),
    ("DCMerge", {"density": 2.0}, r"density must be .* > 0 and at most 1, got 2\.0"),
    ("SurgeryAlgorithm", {"base_metod": 1}, "'base_method'"),
]


@pytest.mark.parametrize(("kind", "keys", "message"), SETTINGS)
def test_wrong_settings(kind: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(rivals, kind)(**keys)


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


def test_models_that_cannot_be_corrected(pool_of, tmp_path) -> None:
    texts = inputs_of(refusing(pool_of("causal")))
    with pytest.raises(CalibrationError, match=r"has no ln_f, but .*final_norm"):
        rivals.RidgeSurgery(final_norm="ln_f").open(texts)
    with pytest.raises(CalibrationError, match="surgery_v2 does not support language models"):
        rivals.SurgeryV2().open(texts)
    encoders = encoder_pool(tmp_path)
    (tmp_path / "pretrained" / "modules.json").unlink()
    with pytest.raises(CalibrationError, match=r"does not support classifiers: .*modules\.json"):
        rivals.RidgeSurgery(stream="calibration").open(inputs_of(refusing(encoders)))


def test_features_and_training_that_are_not_finite(models) -> None:
    with pytest.raises(CalibrationError, match=r"task 'a': .* do not vary"):
        rivals.RidgeSurgery().fit(torch.ones(4, 3), torch.randn(4, 3), "a")
    merged, pool = tower(models, "_merged_"), tiny_pool(models)
    next(merged.parameters()).data.fill_(torch.nan)
    with pytest.raises(CalibrationError, match=r"task one: .* not finite"):
        rivals.Surgery(steps=1, stream="calibration").post_merge(merged, inputs_of(pool))
    suite = clip_suite()
    method = rivals.Distillation(samples_per_task=7, steps=5, learning_rate=1e300)
    with pytest.raises(CalibrationError, match=r"diverged.*method\.learning_rate \(now 1e\+300\)"):
        method.post_merge(suite.merged, in_memory(suite))
