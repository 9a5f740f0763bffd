import json
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from feature_problems import normal
from fusion_bench.models.hf_clip import HFCLIPClassifier
from tiny_pools import TASKS, tiny_pool, tiny_processor
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.lab.rivals.corrected_clip import CorrectedModel
from fusion_bench_featcal.lab.rivals.corrected_model import AffineModule, SurgeryModule
from fusion_bench_featcal.lab.rivals.projection import load_projection

WIDTH = 12
PIXELS = normal(0, 5, 3, 28, 28)


def make(models, kind, normalize):
    corrections = {}
    for seed, task in enumerate(TASKS, start=1):
        if kind == "surgery":
            parts = normal(seed, 3, WIDTH), normal(seed + 10, WIDTH, 3)
            corrections[task] = SurgeryModule(*parts)
        else:
            parts = 0.1 * normal(seed, WIDTH, WIDTH), normal(seed + 10, WIDTH)
            corrections[task] = AffineModule(*parts)
    merged = CLIPVisionModel.from_pretrained(models["_merged_"])
    projection = load_projection(PoolModels(tiny_pool(models)), None)
    samples = {task: {"samples": 8, "split": "train"} for task in TASKS}
    curves = {task: [(0, 2.5), (20, 1.25)] for task in TASKS}
    return CorrectedModel(
        merged, projection, corrections, normalize=normalize, samples=samples, curves=curves
    )


def classify(models, model, task):
    clip_model = CLIPModel.from_pretrained(models["_pretrained_"])
    clip_model.vision_model = model
    classifier = HFCLIPClassifier(clip_model, tiny_processor(models))
    classifier.set_classification_task(["circle", "square"])
    with torch.no_grad():
        output = classifier(PIXELS, task_name=task, return_image_embeds=True, return_dict=True)
    return output["image_embeds"], output["logits"]


KINDS = pytest.mark.parametrize("kind", ["surgery", "ridge"])
NORMS = pytest.mark.parametrize("normalize", ["none", "pre"])


@KINDS
@NORMS
def test_classifier_gets_the_task_s_corrected_features(models, kind, normalize):
    model = make(models, kind, normalize)
    for task in TASKS:
        features = model.projection(model.model(PIXELS).pooler_output)
        if normalize == "pre":
            features = features / features.norm(dim=1, keepdim=True)
        known = model.correction(task)(features)
        if normalize == "none":
            known = known / known.norm(dim=1, keepdim=True)
        torch.testing.assert_close(classify(models, model, task)[0], known)


@KINDS
@NORMS
def test_saved_and_loaded_model_is_the_same(models, kind, normalize, tmp_path):
    model = make(models, kind, normalize)
    model.save_pretrained(tmp_path / "saved")
    loaded = CorrectedModel.from_pretrained(tmp_path / "saved")
    assert (loaded.tasks, loaded.normalize) == (model.tasks, model.normalize)
    assert loaded.samples == model.samples
    assert loaded.curves == model.curves
    assert loaded.samples[TASKS[1]] == {"samples": 8, "split": "train"}
    for task in TASKS:
        for value, known in zip(
            classify(models, loaded, task), classify(models, model, task), strict=True
        ):
            assert torch.equal(value, known)


def test_folder_from_before_curves_were_kept_loads(models, tmp_path):
    make(models, "surgery", "none").save_pretrained(tmp_path / "saved")
    path = tmp_path / "saved" / "feature_corrections.json"
    told = json.loads(path.read_text())
    del told["curves"]
    path.write_text(json.dumps(told))
    assert CorrectedModel.from_pretrained(tmp_path / "saved").curves == {}


def test_folder_without_corrections_is_refused(models):
    with pytest.raises(CalibrationError, match=r"holds no corrected model: feature_corrections"):
        CorrectedModel.from_pretrained(models["_merged_"])


@NORMS
def test_function_that_computes_features_is_taken_too(models, normalize):
    model = make(models, "surgery", normalize)

    def unit_features(tower):
        features = model.projection(tower(PIXELS).pooler_output)
        return features / features.norm(dim=1, keepdim=True)

    corrected, features, removed = model.compute_surgery_features(unit_features, TASKS[0])
    torch.testing.assert_close(corrected, classify(models, model, TASKS[0])[0])
    torch.testing.assert_close(corrected, features - removed)


@pytest.mark.parametrize("task", ["three", None])
def test_unknown_task_lists_the_known_ones(models, task):
    model = make(models, "surgery", "pre")
    with pytest.raises(CalibrationError, match=r"no feature correction for task .*one, two-b\.c"):
        model.compute_surgery_features(normal(0, 2, WIDTH), task)


def test_features_of_other_images_are_refused(models):
    model = make(models, "surgery", "none")
    features = torch.nn.functional.normalize(normal(0, 5, WIDTH), dim=-1)
    with pytest.raises(CalibrationError, match="that are not normalised need the images"):
        model.compute_surgery_features(features, TASKS[0])
    model(PIXELS)
    with pytest.raises(CalibrationError, match="pass them through this model just before"):
        model.compute_surgery_features(features, TASKS[0])


def test_tasks_that_cannot_be_told_apart_are_refused(models):
    model = make(models, "surgery", "pre")
    part: Any = model.corrections["task_one"]
    with pytest.raises(ValueError, match=r"'a-b'.*'a\.b'"):
        CorrectedModel(model.model, model.projection, {"a-b": part, "a.b": part})


def test_model_of_another_dtype_than_the_head_is_corrected(models):
    model = make(models, "surgery", "none")
    model.model.bfloat16()
    projected = model.projection(model(PIXELS.bfloat16()).pooler_output.float())
    unit = torch.nn.functional.normalize(projected, dim=-1)
    corrected, _, _ = model.compute_surgery_features(unit, TASKS[0])
    wanted = torch.nn.functional.normalize(model.correction(TASKS[0])(projected), dim=-1)
    assert corrected.dtype == torch.float32
    torch.testing.assert_close(corrected, wanted)
