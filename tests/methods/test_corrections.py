"""Surgery, ProbSurgery, SurgeryV2 and ridge surgery, and the models that they correct."""

import copy
from typing import Any

import fusion_bench_featcal.pools  # noqa: F401  adapts FusionBench

# isort: split
import pytest
import torch
from fusion_bench.models.hf_clip import HFCLIPClassifier
from rivals import DRAW, applied, trained_by_hand
from sample_pools import three_texts
from tiny_models import normal
from tiny_pools import (
    TASKS,
    assert_equal,
    inputs_of,
    projection_of,
    tiny_pool,
    tiny_processor,
    tower,
)
from tiny_texts import llama_model, sentences, text_pool, with_tests
from torch import Tensor
from torch.nn.functional import normalize as unit
from transformers import CLIPModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab import rivals as methods
from fusion_bench_featcal.lab.rivals.corrected_model import CorrectedModel
from fusion_bench_featcal.lab.rivals.correction_modules import AffineModule, SurgeryModule
from fusion_bench_featcal.lab.rivals.sites import FinalState, ProjectedFeature


def trained(models: Any, pool: Any, kind: str, **settings: Any) -> tuple[Any, Any]:
    settings = DRAW | {"stream": "calibration", "learning_rate": 1e-2, "rank": 3} | settings
    if kind == "ProbSurgery":
        del settings["rank"]
    return applied(kind, inputs_of(pool), tower(models, "_merged_"), **settings)


def pixels_by_task(method: Any, pool: Any) -> dict[str, Tensor]:
    batches = method.batches(inputs_of(pool)).items()
    return {
        task: torch.cat([batch["pixel_values"] for batch in task_batches])
        for task, task_batches in batches
    }


SURGERIES: list[tuple[str, dict[str, Any]]] = [
    ("Surgery", {}),
    ("ProbSurgery", {"hidden": 5, "kl_weight": 0.05}),
]


@pytest.mark.parametrize(("kind", "settings"), SURGERIES)
def test_surgery_trains_as_written_out(kind, settings, models) -> None:
    pool, projection = tiny_pool(models), projection_of(models)
    method, result = trained(models, pool, kind, steps=7, **settings | {"batch_size": 3})
    features = {}
    for task, pixels in pixels_by_task(method, pool).items():
        sides = [tower(models, name)(pixels).pooler_output for name in ("_merged_", task)]
        features[task] = tuple(projection(side).detach() for side in sides)
    reference = trained_by_hand(features, method)
    for task, (down, up) in reference["modules"].items():
        (module,) = result.model.correction(task)
        # A tenth of a step: rounding can turn a sign in the gradient of an L1 loss.
        torch.testing.assert_close(module.down, down, rtol=0, atol=1e-3)
        torch.testing.assert_close(module.up, up, rtol=0, atol=1e-3)
        losses = reference["losses"][task]
        first, mean = (pytest.approx(loss, rel=1e-4) for loss in (losses[0], sum(losses) / 7))
        assert result.curves[task] == [(0, first), (7, mean)]


@pytest.mark.parametrize("kind", [methods.RidgeSurgery, methods.Distillation])
def test_data_are_opened_before_the_merger_and_used_once(kind: Any, models: Any) -> None:
    inputs, opened = inputs_of(tiny_pool(models)), list[Any]()
    draw = inputs.batches
    inputs.batches = lambda settings: opened.append(settings) or draw(settings)
    few = {"stream": "calibration"} if kind is methods.RidgeSurgery else {"steps": 1}
    method = kind(**DRAW | few)
    method.open(inputs)
    for expected in (1, 2):  # a second model opens them again
        method.post_merge(tower(models, "_merged_"), inputs)
        assert len(opened) == expected


def ridge(merged: Tensor, expert: Tensor, strength: Any) -> Any:
    return methods.RidgeSurgery(ridge_lambda=strength).fit(merged, expert, "a")


def affine_drift(samples: int = 40, width: int = 6) -> tuple[Tensor, Tensor]:
    merged = normal(0, samples, width) + 2
    matrix = torch.eye(width).double() + 0.3 * normal(1, width, width)
    return merged, merged @ matrix.T + normal(2, width) + normal(5, samples, width)


def test_ridge_surgery_solves_the_ridge_regression_of_the_drift() -> None:
    merged, expert = affine_drift()
    module, centred = ridge(merged, expert, 0.2), merged - merged.mean(0)
    drift = merged - expert
    scale = 0.2 * centred.square().sum() / 6 * torch.eye(6)
    matrix = torch.linalg.solve(centred.T @ centred + scale, centred.T @ (drift - drift.mean(0))).T
    torch.testing.assert_close(module.matrix, matrix)
    torch.testing.assert_close(module.shift, drift.mean(0) - matrix @ merged.mean(0))
    for samples, strength in ((1, 0.1), (4, 0)):  # few samples are reproduced
        merged, expert = affine_drift(samples=samples, width=10)
        torch.testing.assert_close(ridge(merged, expert, strength)(merged), expert)


def test_auto_takes_the_least_error_of_refits_without_each_sample() -> None:
    merged, expert = affine_drift(samples=12)
    grid = [10.0 ** (exponent / 2) for exponent in range(-8, 5)]
    errors = dict.fromkeys(grid, 0.0)
    variance = (merged - merged.mean(0)).square().mean()
    for strength in grid:
        for left_out in range(12):
            rows = [row for row in range(12) if row != left_out]
            part = merged[rows]
            less = (part - part.mean(0)).square().mean()  # the strength is that of the full fit
            module = ridge(part, expert[rows], strength * float(12 * variance / (11 * less)))
            gap = module(merged[left_out]) - expert[left_out]
            errors[strength] += float(gap.square().sum())
    best = min(grid, key=lambda strength: errors[strength])
    assert grid[0] < best < grid[-1]
    assert_equal(ridge(merged, expert, "auto"), ridge(merged, expert, best))


@torch.no_grad()
def site_features(model: Any, pixels: Tensor, project: Any, sites: Any = None) -> list[Tensor]:
    """Token means behind every block and final features, with corrections in the blocks."""
    means: list[Tensor] = []
    blocks = [m for m in model.modules() if type(m).__name__ == "CLIPEncoderLayer"]
    corrections = [lambda hidden: hidden] * len(blocks) if sites is None else sites[:-1]

    def hook(correct: Any) -> Any:
        def change(_: Any, __: Any, output: Any) -> Any:
            hidden = correct(output if isinstance(output, Tensor) else output[0])
            means.append(hidden.mean(1))
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return change

    pairs = zip(blocks, corrections, strict=True)
    hooks = [block.register_forward_hook(hook(correct)) for block, correct in pairs]
    features = project(model(pixels).pooler_output)
    for handle in hooks:
        handle.remove()
    return [*means, features if sites is None else sites[-1](features)]


def test_surgery_v2_trains_on_the_drift_behind_every_block_and_applies_it(models) -> None:
    pool, project, merged = tiny_pool(models), projection_of(models), tower(models, "_merged_")
    settings = {"steps": 6, "batch_size": 8, "optimizer": "per_task"}
    method, result = trained(models, pool, "SurgeryV2", **settings)
    model = result.model
    for task, pixels in pixels_by_task(method, pool).items():
        target = site_features(tower(models, task), pixels, project)
        sides = zip(site_features(merged, pixels, project), target, strict=True)
        expected = sum(float((one - other).abs().mean()) for one, other in sides)
        (_, first), (_, mean) = result.curves[task]
        assert first == pytest.approx(expected, rel=2e-4) and mean < first
        expected = site_features(merged, pixels, project, model.correction(task))[-1]
        torch.testing.assert_close(model.features(task, pixels), expected)
        assert torch.equal(model(pixels).pooler_output, merged(pixels).pooler_output)
        assert all(bool(weight.any()) for weight in model.correction(task).parameters())


def test_the_test_stream_learns_from_the_experts_answers_alone(tmp_path) -> None:
    """Other answers of the test split change nothing."""
    pool = text_pool("causal", tmp_path)
    few = {"samples_per_task": 6, "batch_size": 3, "generated_tokens": 3, "stream": "test_tta"}

    def fitted(pool: Any) -> Any:
        return applied("RidgeSurgery", inputs_of(pool), pool.load_model("_pretrained_"), **few)

    method, result = fitted(pool)
    assert method.samples(result)["two"] == {"samples": 6, "split": "test"}
    rows = lambda task: [row | {"target": "t s r q"} for row in sentences(task)]  # noqa: E731
    assert_equal(fitted(with_tests(copy.copy(pool), rows))[1].model, result.model)


# ---- models with corrections


@torch.no_grad()
def test_fusion_benchs_classifier_gets_the_tasks_corrected_features(models) -> None:
    pixels = normal(0, 5, 3, 28, 28).float()
    merged, projection = tower(models, "_merged_"), projection_of(models)
    features = projection(merged(pixels).pooler_output)
    width = features.shape[1]
    modules: dict[str, Any] = {
        TASKS[0]: [SurgeryModule(normal(1, 3, width).float(), normal(2, width, 3).float())],
        TASKS[1]: [AffineModule(normal(3, width, width).float() / 9, normal(4, width).float())],
    }
    (surgery,), (affine,) = modules.values()
    expected = {
        TASKS[0]: [f - surgery.up @ (surgery.down @ f).clamp(min=0) for f in features],
        TASKS[1]: [f - affine.matrix @ f - affine.shift for f in features],
    }
    model = CorrectedModel(merged, modules, ProjectedFeature(projection))
    clip_model: Any = CLIPModel.from_pretrained(models["_pretrained_"])
    clip_model.vision_model = model
    classifier = HFCLIPClassifier(clip_model, tiny_processor(models))
    classifier.set_classification_task(["circle", "square"])
    for task, rows in expected.items():
        torch.testing.assert_close(model.features(task, pixels), torch.stack(rows))
        options: Any = {"task_name": task, "return_image_embeds": True, "return_dict": True}
        embeddings = classifier(pixels, **options)["image_embeds"]
        torch.testing.assert_close(embeddings, unit(torch.stack(rows), dim=-1))
    with pytest.raises(CalibrationError, match="not those of the images"):
        model.compute_surgery_features(unit(-features, dim=-1), TASKS[0])


def test_a_correction_acts_at_every_decoded_position_of_its_task_alone() -> None:
    model: Any = llama_model(0).float().eval()
    batch, head = three_texts("causal"), model.get_output_embeddings()
    width = head.in_features
    module = AffineModule(normal(1, width, width).float(), normal(2, width).float())
    corrected = CorrectedModel(model, {"one": [module]}, FinalState("model.norm"))
    plain, states = model(**batch).logits, model.model(batch["input_ids"], batch["attention_mask"])
    expected = head(module(states.last_hidden_state))
    first, mask = batch["input_ids"][:1, :2], batch["attention_mask"][:1, :2]
    with corrected.for_task("one"):
        torch.testing.assert_close(corrected(**batch).logits, expected)
        answer = corrected.generate(input_ids=first, attention_mask=mask, max_new_tokens=1)
    assert answer[0, -1] == expected[0, 1].argmax()
    assert torch.equal(model(**batch).logits, plain)
    with pytest.raises(CalibrationError, match="need the task of each input"):
        corrected(**batch)
