"""RegMean: known answers, FusionBench's own result, and what it needs no base for."""

import copy

import pytest
import torch
from calibrations import assert_identical, assert_same, distance, replay, samples_in
from fusion_bench_mergers import SAMPLES, FewSamplesPool, their_regmean
from tiny_models import Suite, blocks_of, clip_suite, gpt2_suite, residual_suite
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.methods.regmean import regmean
from fusion_bench_featcal.methods.standalone import RegMeanAlgorithm


def run(suite: Suite, **options) -> nn.Module:
    settings = FeatCalSettings(samples_per_task=samples_in(suite), family=replay(suite))
    return regmean(suite.base, suite.experts, suite.inputs, settings, progress=False, **options)


def mean_of(suite: Suite) -> nn.Module:
    merged = copy.deepcopy(suite.base)
    states = [expert.state_dict() for expert in suite.experts.values()]
    merged.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
    return merged


def module_inputs(model: nn.Module, batches: list, name: str) -> Tensor:
    """Rows that a module receives over whole forward passes."""
    rows: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: rows.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    handle.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("off_diagonal", [0.95, 0.3])
def test_is_the_formula_on_features_of_the_whole_experts(off_diagonal: float) -> None:
    suite = clip_suite(sizes=(9, 5))
    found, mean = run(suite, off_diagonal=off_diagonal), mean_of(suite)
    for block in blocks_of(suite.base, "CLIPEncoderLayer"):
        for name in ("self_attn.k_proj", "self_attn.out_proj", "mlp.fc2"):
            left = right = torch.zeros((), dtype=torch.float64)
            for task, expert in suite.experts.items():
                x = module_inputs(expert, suite.inputs[task], f"{block}.{name}")
                gram = x.T @ x / len(x)
                gram = off_diagonal * gram + (1 - off_diagonal) * torch.diag(gram.diagonal())
                left = left + expert.get_parameter(f"{block}.{name}.weight") @ gram
                right = right + gram
            wanted = left @ torch.linalg.inv(right)
            weight = f"{block}.{name}.weight"
            torch.testing.assert_close(found.get_parameter(weight), wanted, rtol=1e-7, atol=1e-9)
            mean.get_parameter(weight).data.copy_(found.get_parameter(weight))
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.fc1"):
            weight = f"{block}.{name}.weight"
            mean.get_parameter(weight).data.copy_(found.get_parameter(weight))
    assert_same(found, mean)  # all else is the experts' mean


@pytest.mark.parametrize("off_diagonal", [0.95, 0.5])
def test_agrees_with_fusion_bench(off_diagonal: float, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it keeps its zero-shot heads
    theirs = their_regmean(off_diagonal)
    ours = RegMeanAlgorithm(off_diagonal=off_diagonal, samples_per_task=SAMPLES).run(
        FewSamplesPool()
    )
    for name, value in ours.state_dict().items():
        # they invert in float32
        bound = 5e-3 if off_diagonal > 0.9 else 5e-4
        assert float((value - theirs[name]).norm() / theirs[name].norm()) < bound, name


@pytest.mark.parametrize("make", [clip_suite, gpt2_suite, residual_suite])
def test_equal_experts_give_that_expert(make) -> None:
    suite = make()
    expert = next(iter(suite.experts.values()))
    alike = {task: expert for task in suite.experts}
    same = Suite(suite.merged, suite.base, alike, suite.inputs, suite.blocks)
    assert_same(run(same), expert)


def test_values_of_the_base_do_not_matter() -> None:
    suite = residual_suite()
    other = Suite(suite.merged, suite.merged, suite.experts, suite.inputs, suite.blocks)
    assert_identical(run(suite), run(other))


def test_batches_and_order_of_tasks_do_not_matter() -> None:
    suite, once = clip_suite(sizes=(4, 3)), clip_suite(sizes=(7,))
    assert_same(run(suite), run(once))
    turned = Suite(
        suite.merged, suite.base, dict(reversed(suite.experts.items())), suite.inputs, suite.blocks
    )
    assert_same(run(suite), run(turned))


def test_padding_does_not_count() -> None:
    assert_same(run(gpt2_suite(padded=6)), run(gpt2_suite(padded=9)))


def test_nothing_that_came_in_is_changed() -> None:
    suite = residual_suite()
    before = copy.deepcopy(suite)
    run(suite)
    assert_identical(suite.base, before.base)
    for task, expert in suite.experts.items():
        assert_identical(expert, before.experts[task])


def test_unit_grams_change_the_weights_of_tasks_only() -> None:
    suite = residual_suite()
    weighted, equal = run(suite, task_weights="unit_gram"), run(suite)
    assert distance(weighted, equal) > 1e-3
    assert torch.equal(weighted.get_parameter("embed.weight"), equal.get_parameter("embed.weight"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"off_diagonal": 1.5}, r"method\.off_diagonal must be in \[0, 1\], got 1\.5"),
        ({"task_weights": "mine"}, r"method\.task_weights must be equal or unit_gram, got 'mine'"),
        ({"samples_per_tsk": 3}, r"method\.samples_per_tsk .* 'samples_per_task'"),
        ({"samples_per_task": 0}, r"method\.samples_per_task must be an integer >= 1, got 0"),
        ({"ridge_lambda": 1.0}, r"method\.ridge_lambda is no setting"),
    ],
)
def test_bad_settings_are_named(keys, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegMeanAlgorithm(**keys)


def test_pool_without_base_is_refused() -> None:
    pool = FewSamplesPool()
    del pool._models["_pretrained_"]
    with pytest.raises(CalibrationError, match=r"modelpool\.models\._pretrained_"):
        RegMeanAlgorithm().run(pool)
