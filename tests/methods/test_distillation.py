"""Distillation: what is trained, towards what, from which samples, and what is refused."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import assert_identical, replay
from text_pools import text_pool
from tiny_models import (
    Suite,
    clip_suite,
    decoder_suite,
    gpt2_suite,
    residual_suite,
    t5_suite,
)
from tiny_open_clip import tower_suite
from tiny_pools import TASKS, inputs_of, pictures, tiny_pool
from tiny_texts import sentences, with_data
from torch import Tensor, nn
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.rivals import Distillation, DistillationAlgorithm
from fusion_bench_featcal.lab.rivals import distillation as module

SHORT: dict[str, Any] = {"steps": 8, "samples_per_task": 8, "batch_size": 4}
SUITES: dict[str, Any] = {
    "clip": clip_suite,
    "open_clip": tower_suite,
    "llama": decoder_suite,
    "t5": t5_suite,
    "gpt2": gpt2_suite,
    "residual": residual_suite,
}
SLOW = ("llama", "gpt2")


def given(suite: Suite) -> Any:
    """Inputs of the method for models in memory."""
    pool = SimpleNamespace(
        _models={},
        model_names=list(suite.experts),
        load_model=lambda task: copy.deepcopy(suite.experts[task]),
    )
    fabric = SimpleNamespace(device=torch.device("cpu"))
    return SimpleNamespace(modelpool=pool, fabric=fabric, batches=lambda _: suite.inputs)


def distilled(suite: Suite, **settings: Any) -> Any:
    family = suite.family if isinstance(suite.family, str) else replay(suite)
    options = {"steps": 60, "learning_rate": 3e-3, "samples_per_task": 7, "family": family}
    method = Distillation(**(options | settings))
    return method.post_merge(copy.deepcopy(suite.merged), given(suite))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name, make in SUITES.items()
    ],
)
def test_loss_falls_and_only_blocks_change(make: Any) -> None:
    suite = make()
    experts = copy.deepcopy(suite.experts)
    found = distilled(suite)
    for curve in found.curves.values():
        assert curve[-1][1] < 0.7 * curve[0][1]
    before = dict(suite.merged.named_parameters())
    blocks = tuple(f"{block}." for block in suite.blocks)
    for name, value in found.named_parameters():
        if not name.startswith(blocks):
            assert torch.equal(value, before[name]), name
        assert value.requires_grad == before[name].requires_grad
    changed = [n for n, v in found.named_parameters() if not torch.equal(v, before[n])]
    assert len(changed) > 0.8 * sum(name.startswith(blocks) for name in before)
    for task, expert in experts.items():
        assert_identical(suite.experts[task], expert)


def relative_distance(model: nn.Module, expert: nn.Module, batches: list[Any]) -> float:
    """The loss over all samples of a CLIP tower, written out."""
    with torch.no_grad():
        found, wanted = (
            torch.cat([tower(**batch).pooler_output for batch in batches])
            for tower in (model, expert)
        )
    return float((found - wanted).square().sum() / wanted.square().sum())


def test_loss_is_the_squared_distance_relative_to_the_experts_features() -> None:
    suite = clip_suite(sizes=(7,))
    curves = distilled(suite, steps=1).curves
    for task, expert in suite.experts.items():
        known = relative_distance(suite.merged, expert, suite.inputs[task])
        assert curves[task][0] == (0, pytest.approx(known, rel=1e-5))


def test_tasks_count_alike_whatever_the_size_of_their_features() -> None:
    suite = clip_suite(tasks=2, sizes=(7,))
    expert = suite.experts["task_0"]
    other = copy.deepcopy(expert)
    twin = Suite(suite.merged, suite.base, {"a": expert, "b": other}, {}, suite.blocks)
    twin.inputs = {task: suite.inputs["task_0"] for task in twin.experts}
    both = distilled(twin, steps=5)
    alone = distilled(
        Suite(suite.merged, suite.base, {"a": expert}, {"a": suite.inputs["task_0"]}, suite.blocks),
        steps=5,
    )
    for name, value in both.named_parameters():
        torch.testing.assert_close(value, alone.get_parameter(name))


def test_positions_that_predict_nothing_have_no_part_in_the_loss() -> None:
    suite = decoder_suite(extra=3)
    known = distilled(suite, steps=3)
    padded = copy.deepcopy(suite)
    for batches in padded.inputs.values():
        for batch in batches:
            batch["input_ids"][batch["attention_mask"] == 0] = 7
    assert_identical(distilled(padded, steps=3), known)
    moved = copy.deepcopy(suite)
    for batches in moved.inputs.values():
        for batch in batches:
            batch["labels"][batch["attention_mask"] > 0] = 5  # all positions predict something
    assert not torch.equal(
        *(next(m.model.layers[1].parameters()) for m in (distilled(moved, steps=3), known))
    )


def test_repeats_itself_and_depends_on_the_seed() -> None:
    suite = clip_suite(sizes=(2, 2, 3))
    first, again, other = (distilled(suite, steps=5, seed=seed) for seed in (1, 1, 2))
    assert_identical(first, again)
    assert first.curves == again.curves
    assert first.curves != other.curves


def test_each_expert_runs_once_over_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    suite = clip_suite(sizes=(4, 3))
    runs: dict[str, int] = dict.fromkeys(suite.experts, 0)
    inputs = given(suite)

    def load(task: str) -> nn.Module:
        expert = copy.deepcopy(suite.experts[task])
        expert.register_forward_hook(lambda *_: runs.update({task: runs[task] + 1}))
        return expert

    inputs.modelpool.load_model = load
    Distillation(steps=20, samples_per_task=7).post_merge(copy.deepcopy(suite.merged), inputs)
    assert runs == dict.fromkeys(runs, 2)


def test_half_precision_is_trained_in_float32() -> None:
    suite = clip_suite(sizes=(7,))
    exact, half = suite.to(torch.float32), suite.to(torch.bfloat16)
    for part in (exact, half):
        part.inputs = {
            task: [{"pixel_values": batch["pixel_values"].float()} for batch in batches]
            for task, batches in suite.inputs.items()
        }
    found = distilled(half, learning_rate=1e-4)  # steps that bfloat16 would round away
    assert all(value.dtype == torch.bfloat16 for value in found.parameters())
    for task, curve in found.curves.items():
        assert curve[-1][1] < 0.97 * curve[0][1]
        assert curve[0][1] == pytest.approx(distilled(exact, steps=1).curves[task][0][1], rel=0.1)


def distilled_pool(models: Any, pool: Any = None, method: Any = None) -> nn.Module:
    merged = CLIPVisionModel.from_pretrained(models["_merged_"])
    return (method or Distillation(**SHORT)).post_merge(
        merged, inputs_of(pool or tiny_pool(models))
    )


def test_labels_of_images_change_nothing(models: Any) -> None:
    known = distilled_pool(models)
    pool = tiny_pool(models)
    pool.load_train_dataset = lambda task: [
        item | {"label": 2 - item["label"]} for item in pictures(task, "train", 12)
    ]
    pool.load_test_dataset = lambda task: pytest.fail("test data was read")
    assert_identical(distilled_pool(models, pool), known)


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_written_answers_make_labels_of_texts_superfluous(kind: str, tmp_path: Any) -> None:
    pool = text_pool(kind, tmp_path)
    method = Distillation(**SHORT, calibration_targets="generated", generated_tokens=3)

    def others(task: str) -> list[dict[str, str]]:
        return [row | {"target": "t s"} for row in sentences(task)]

    def run(rows: Any) -> nn.Module:
        given_rows = with_data(copy.copy(pool), rows)
        return method.post_merge(pool.load_model("_pretrained_"), inputs_of(given_rows))

    assert_identical(run(sentences), run(others))


def test_says_what_it_used_and_adds_nothing(models: Any, caplog: Any) -> None:
    method = Distillation(**SHORT)
    model = distilled_pool(models, method=method)
    assert "without effect" not in caplog.text  # settings that nobody made
    assert isinstance(model, CLIPVisionModel)
    drawn = {"samples": 8, "split": "train"}
    assert method.samples(model, [*TASKS, "another"]) == dict.fromkeys(TASKS, drawn)
    assert method.added(model) == {}
    assert method.settings["learning_rate"] == Distillation().learning_rate


def test_algorithm_is_the_method_over_the_merged_model(models: Any) -> None:
    found = DistillationAlgorithm(**SHORT).run(tiny_pool(models))
    assert_identical(found, distilled_pool(models))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"learning_rate": 0}, r"method\.learning_rate must be a finite number > 0, got 0"),
        ({"steps": 0}, r"method\.steps must be an integer >= 1, got 0"),
        ({"stepz": 3}, r"method\.stepz is no setting of distillation .*'steps'"),
        ({"batch_size": 0}, r"batch_size"),
        ({"ridge_lambda": 1}, r"method\.ridge_lambda is no setting"),
        ({"family": "clipp"}, r"method\.family must be"),
    ],
)
def test_settings_out_of_range_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Distillation(**keys)


def test_diverged_training_names_the_setting() -> None:
    with pytest.raises(CalibrationError, match=r"diverged.*method\.learning_rate \(now 1e\+300\)"):
        distilled(clip_suite(), learning_rate=1e300)


def silent(model: nn.Module) -> nn.Module:
    """The model with final features of zero."""
    model.register_forward_hook(
        lambda _, __, output: output.__class__(pooler_output=0 * output.pooler_output)
    )
    return model


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda expert: silent(expert), r"task task_0: the expert's final features .* of 0\."),
        (
            lambda expert: clip_suite(width=6).base,
            r"task task_0: .*of the same samples, got \(4, 12\) and \(4, 6\)",
        ),
        (
            lambda expert: expert.requires_grad_(False).apply(_spoil),
            r"task task_0: .*the expert's features are not finite",
        ),
    ],
)
def test_unusable_features_name_the_task(change: Any, message: str) -> None:
    suite = clip_suite()
    suite.experts["task_0"] = change(suite.experts["task_0"])
    with pytest.raises(CalibrationError, match=message):
        distilled(suite)


def _spoil(part: nn.Module) -> None:
    if isinstance(part, nn.LayerNorm):
        part.weight.fill_(torch.nan)


def test_token_ids_that_the_model_lacks_name_task_and_sample() -> None:
    suite = decoder_suite()
    ids: Tensor = suite.inputs["task_1"][1]["input_ids"]
    ids[2, 0] = 99
    with pytest.raises(CalibrationError, match=r"task task_1, sample 5: input_ids has .* id 99"):
        distilled(suite)


def test_tasks_without_samples_are_named() -> None:
    suite = clip_suite()
    suite.inputs["task_2"] = []
    with pytest.raises(CalibrationError, match="task task_2 has 0 calibration samples"):
        distilled(suite)


def test_one_sample_is_enough() -> None:
    suite = clip_suite(sizes=(1,))
    found = distilled(suite, samples_per_task=1)
    assert all(curve[-1][1] < curve[0][1] for curve in found.curves.values())


def test_pool_without_the_split_is_refused_before_a_model_is_loaded(models: Any) -> None:
    pool = tiny_pool(models, train=0)
    pool.load_model = lambda *_, **__: pytest.fail("a model was loaded")
    with pytest.raises(CalibrationError, match=r"train_datasets\.one"):
        DistillationAlgorithm(**SHORT).run(pool)


def test_memory_is_one_task_s_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are summed task by task: no graph of two tasks is there at once."""
    graphs: list[str] = []
    distance = module._distance

    def noted(model: nn.Module, lesson: Any) -> Tensor:
        graphs.append("made")
        loss = distance(model, lesson)
        loss.register_hook(lambda _: graphs.append("used"))
        return loss

    monkeypatch.setattr(module, "_distance", noted)
    distilled(clip_suite(), steps=2)
    assert graphs == ["made", "used"] * 6
