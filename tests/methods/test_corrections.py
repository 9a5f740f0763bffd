"""Surgery, ProbSurgery, SurgeryV2 and ridge surgery beside slow versions and closed forms."""

import copy
from typing import Any

import pytest
import torch
from rivals import DRAW, improved, trained_by_hand
from tiny_models import normal
from tiny_pools import TASKS, assert_equal, inputs_of, pictures, projection_of, tiny_pool, tower
from tiny_texts import sentences, text_pool, text_tokenizer, with_tests
from torch import Tensor

from fusion_bench_featcal.lab.rivals import RidgeSurgery
from fusion_bench_featcal.tasks import TextTaskPool


def trained(models: Any, pool: Any, kind: str, **settings: Any) -> tuple[Any, Any]:
    settings = DRAW | {"stream": "calibration", "learning_rate": 1e-2, "rank": 3} | settings
    if kind == "ProbSurgery":
        del settings["rank"]
    return improved(kind, inputs_of(pool), tower(models, "_merged_"), **settings)


def pixels_by_task(method: Any, pool: Any) -> dict[str, Tensor]:
    batches = method.batches(inputs_of(pool)).items()
    return {task: torch.cat([batch["pixel_values"] for batch in of_it]) for task, of_it in batches}


SURGERIES: list[tuple[str, dict[str, Any]]] = [
    ("Surgery", {}),
    ("Surgery", {"optimizer": "per_task", "seed": 3}),
    ("ProbSurgery", {"hidden": 5, "kl_weight": 0.05}),
]


@pytest.mark.parametrize(("kind", "settings"), SURGERIES)
def test_surgery_trains_as_written_out(kind, settings, models) -> None:
    pool, projection = tiny_pool(models), projection_of(models)
    method, model = trained(models, pool, kind, steps=7, **settings | {"batch_size": 3})
    features = {}
    for task, pixels in pixels_by_task(method, pool).items():
        sides = [tower(models, name)(pixels).pooler_output for name in ("_merged_", task)]
        features[task] = tuple(projection(side).detach() for side in sides)
    reference = trained_by_hand(features, method)
    for task, (down, up) in reference["modules"].items():
        (module,) = model.correction(task)
        # A tenth of a step: rounding can turn a sign in the gradient of an L1 loss.
        torch.testing.assert_close(module.down, down, rtol=0, atol=1e-3)
        torch.testing.assert_close(module.up, up, rtol=0, atol=1e-3)
        losses = reference["losses"][task]
        first, mean = (pytest.approx(loss, rel=1e-4) for loss in (losses[0], sum(losses) / 7))
        assert model.curves[task] == [(0, first), (7, mean)]


def ridge(merged: Tensor, expert: Tensor, strength: Any) -> Any:
    return RidgeSurgery(ridge_lambda=strength).fit(merged, expert, "a")


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
    """The loss of an update is that with the modules of the updates before it."""
    pool, project, merged = tiny_pool(models), projection_of(models), tower(models, "_merged_")
    settings: dict[str, Any] = {"batch_size": 8, "optimizer": "per_task"}
    method, result = trained(models, pool, "SurgeryV2", steps=6, **settings)
    _, before = trained(models, pool, "SurgeryV2", steps=5, **settings)
    for task, pixels in pixels_by_task(method, pool).items():
        (first, (_, mean)), (_, (_, five)) = result.curves[task], before.curves[task]
        losses = {0: first[1], 5: 6 * mean - 5 * five}
        target = site_features(tower(models, task), pixels, project)
        for step, sites in ((0, None), (5, before.correction(task))):
            sides = zip(site_features(merged, pixels, project, sites), target, strict=True)
            expected = sum(float((one - other).abs().mean()) for one, other in sides)
            assert losses[step] == pytest.approx(expected, rel=2e-4)
        expected = site_features(merged, pixels, project, result.correction(task))[-1]
        torch.testing.assert_close(result.features(task, pixels), expected)
        assert torch.equal(result(pixels).pooler_output, merged(pixels).pooler_output)
        assert all(bool(weight.any()) for weight in result.correction(task).parameters())


@pytest.mark.parametrize(
    ("stream", "split", "number"), [("calibration", "train", 12), ("test_tta", "test", 10)]
)
def test_streams_draw_of_their_split_and_say_so(stream, split, number, models, caplog) -> None:
    def fitted(pool: Any, samples: int = 8) -> Any:
        settings = {"samples_per_task": samples, "stream": stream}
        return improved("RidgeSurgery", inputs_of(pool), tower(models, "_merged_"), **settings)

    pool = tiny_pool(models)
    method, model = fitted(pool)
    used = {task: {"samples": 8, "split": split} for task in TASKS}
    assert method.samples(TASKS) == used
    indices = {task: b.indices for task, b in method.batches(inputs_of(pool)).items()}
    items = {task: pictures(task, split, number) for task in TASKS}
    chosen = {task: [items[task][i] for i in numbers] for task, numbers in indices.items()}
    setattr(pool, f"load_{split}_dataset", chosen.__getitem__)
    again = fitted(pool)[1].state_dict()
    torch.testing.assert_close(model.state_dict(), again, rtol=1e-3, atol=1e-4)
    whole = fitted(tiny_pool(models), samples=99)
    assert whole[0].samples(["one"]) == {"one": {"samples": number, "split": split}}
    assert f"task one has {number} samples, fewer than method.samples_per_task = 99" in caplog.text


@pytest.mark.parametrize("kind", ["causal", pytest.param("seq2seq", marks=pytest.mark.slow)])
def test_the_test_stream_learns_from_the_experts_answers_alone(kind, tmp_path) -> None:
    """Other answers of the test split change nothing, and task pools name the task."""
    pool, tokenizer = text_pool(kind, tmp_path), text_tokenizer(kind)
    few = {"samples_per_task": 6, "batch_size": 3, "generated_tokens": 3, "stream": "test_tta"}

    def fitted(pool: Any) -> Any:
        return improved("RidgeSurgery", inputs_of(pool), pool.load_model("_pretrained_"), **few)

    method, model = fitted(pool)
    stream, expert, answers = method.batches(inputs_of(pool))["two"], pool.load_model("two"), []
    for index in stream.indices:
        ids = tokenizer(sentences("two")[index]["prompt"], return_tensors="pt")["input_ids"]
        new = expert.eval().generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)[0]
        answers.append(new[1 if kind == "seq2seq" else ids.shape[1] :].tolist())
    assert [row[row >= 0].tolist() for batch in stream for row in batch["labels"]] == answers
    rows = lambda task: [row | {"target": "t s r q"} for row in sentences(task)]  # noqa: E731
    assert_equal(fitted(with_tests(copy.copy(pool), rows))[1], model)
    test_sets: Any = {task: sentences(task, 4) for task in ("one", "two")}
    taskpool = TextTaskPool(test_sets, tokenizer=tokenizer, batch_size=4, max_new_tokens=2)
    report, plain = taskpool.evaluate(model), taskpool.evaluate(model.model)
    assert all(report[task]["loss"] != plain[task]["loss"] for task in test_sets)
