"""Models with corrections: FusionBench's protocol, language models, and folders."""

from typing import Any

import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
import pytest
import torch
from fusion_bench.models.hf_clip import HFCLIPClassifier
from sample_pools import three_texts
from tiny_models import normal
from tiny_pools import TASKS, projection_of, tiny_processor, tower
from tiny_texts import MAKERS, NORMS
from torch import Tensor
from torch.nn.functional import normalize as unit
from transformers import CLIPModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.rivals.corrected_model import (
    AffineModule,
    CorrectedModel,
    SurgeryModule,
)
from fusion_bench_featcal.lab.rivals.sites import FinalState, ProjectedFeature

PIXELS = normal(0, 5, 3, 28, 28).float()
KINDS = pytest.mark.parametrize("kind", list(MAKERS))
WIDTH = 8


def module(kind: str, seed: int, width: int = 12) -> Any:
    if kind == "surgery":
        return SurgeryModule(normal(seed, 3, width).float(), normal(seed + 9, width, 3).float())
    return AffineModule(normal(seed, width, width).float() / 9, normal(seed + 9, width).float())


def written_out(kind: str, seed: int, x: Tensor) -> Tensor:
    part = module(kind, seed, x.shape[-1])
    if kind == "surgery":
        return torch.stack([f - part.up @ (part.down @ f).clamp(min=0) for f in x]).detach()
    return torch.stack([f - part.matrix @ f - part.shift for f in x]).detach()


@torch.no_grad()
def classified(models: Any, model: Any, task: str) -> Tensor:
    """Image embeddings of FusionBench's classifier with this tower."""
    clip_model: Any = CLIPModel.from_pretrained(models["_pretrained_"])
    clip_model.vision_model = model
    classifier = HFCLIPClassifier(clip_model, tiny_processor(models))
    classifier.set_classification_task(["circle", "square"])
    options = {"task_name": task, "return_image_embeds": True, "return_dict": True}
    return classifier(PIXELS, **options)["image_embeds"]


@pytest.mark.parametrize("kind", ["surgery", "ridge"])
def test_the_classifier_gets_the_tasks_corrected_features(kind, models) -> None:
    merged, projection = tower(models, "_merged_"), projection_of(models)
    modules = {task: [module(kind, seed)] for seed, task in enumerate(TASKS)}
    model = CorrectedModel(merged, modules, ProjectedFeature(projection))
    features = projection(merged(PIXELS).pooler_output).detach()

    for seed, task in enumerate(TASKS):
        by_hand = written_out(kind, seed, features)
        torch.testing.assert_close(model.features(task, PIXELS), by_hand)
        by_hand = unit(by_hand, dim=-1)
        torch.testing.assert_close(classified(models, model, task), by_hand)
    with pytest.raises(CalibrationError, match="not those of the images"):
        model.compute_surgery_features(unit(-features, dim=-1), TASKS[0])


@KINDS
def test_a_correction_acts_at_every_decoded_position_of_its_task_alone(kind) -> None:
    """Behind it the head prefers one token, whatever it is given."""
    model: Any = MAKERS[kind](0).float().eval()
    batch = three_texts(kind, left=True)
    head = model.get_output_embeddings().weight.detach()
    shift = AffineModule(torch.eye(WIDTH), -100 * head[9].clone())
    corrected = CorrectedModel(model, {"one": [shift]}, FinalState(NORMS[kind]))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    words: Any = inputs | {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False}

    def written(speaker: Any) -> Tensor:
        return speaker.generate(**words, pad_token_id=0)[:, -5:]

    before = written(model)
    with corrected.for_task("one"):
        assert (written(corrected) == int((head @ head[9]).argmax())).all()
    assert torch.equal(written(corrected.model), before)
    with pytest.raises(CalibrationError, match="must be told the task"):
        corrected(**batch)
