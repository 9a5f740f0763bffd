"""DC-Merge and ESM: formulas, limits and invariances."""

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from calibrations import assert_same, calls_of, gamma, samples_in
from tiny_models import Suite, add_up, clip_suite, decoder_suite, normal, t5_suite
from tiny_open_clip import converted
from torch import Tensor, nn

from fusion_bench_featcal.lab.rivals import ESM, DCMerge
from fusion_bench_featcal.lab.rivals.dc_merge import matrix_names
from fusion_bench_featcal.lab.rivals.esm import merged_step, output_directions, relative

WIDE = torch.float64
ALL = DCMerge(density=1.0)


def rounding_of(*matrices: Tensor) -> float:
    """Bound of the relative rounding error of a few products and decompositions."""
    return 100 * gamma(max(max(x.shape) for x in matrices), WIDE)


def assert_close(x: Tensor, y: Tensor, bound: float) -> None:
    assert bound < 1e-6 and float((x - y).norm()) <= bound * float(y.norm())


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def orthogonal(seed: int, *shape: int) -> Tensor:
    return torch.linalg.qr(normal(seed, *shape)).Q


# --- DC-Merge ---


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_dc_merge_of_one_task_is_its_step_or_the_best_one_of_lower_rank(shape) -> None:
    step = normal(0, 1, *shape)
    assert_close(ALL.merged_step(step), step[0], rounding_of(step))
    u, s, v = torch.linalg.svd(step[0], full_matrices=False)
    few = DCMerge(density=3 / 16).merged_step(step)
    assert_close(few, (u[:, :3] * s[:3]) @ v[:3], rounding_of(step))


def test_dc_merge_of_tasks_without_common_directions_is_their_sum() -> None:
    u, v = orthogonal(0, 9, 6), orthogonal(1, 7, 6)
    steps = torch.stack([3 * u[:, :3] @ v[:, :3].T, 4 * u[:, 3:] @ v[:, 3:].T])
    method = DCMerge(density=3 / 36)  # all entries that are not rounding errors
    assert_close(method.merged_step(steps), steps.sum(0), rounding_of(steps))


@pytest.mark.parametrize("smoothing", ["none", "average", "linear"])
def test_dc_merge_does_not_depend_on_the_order_of_tasks(smoothing: str) -> None:
    steps, method = normal(0, 3, 12, 9), DCMerge(density=0.2, smoothing=smoothing)
    assert_close(method.merged_step(steps.flip(0)), method.merged_step(steps), 1e-9)


def test_smoothing_keeps_the_sum_of_singular_values_and_the_rank() -> None:
    step = (orthogonal(0, 8, 3) * torch.tensor([9.0, 2, 1], dtype=WIDE)) @ orthogonal(1, 6, 3).T
    for smoothing, expected in (("average", (4, 4, 4)), ("linear", (20 / 3, 4, 4 / 3))):
        method = DCMerge(density=1.0, smoothing=smoothing, ratio=5.0)
        values = torch.linalg.svdvals(method.merged_step(step[None]))
        assert_close(values, torch.tensor([*expected, 0, 0, 0], dtype=WIDE), rounding_of(step))


@pytest.mark.parametrize("suite", [clip_suite(), t5_suite(), decoder_suite()])
def test_dc_merge_of_models_averages_all_but_linear_weights(suite: Suite) -> None:
    before = {name: value.clone() for name, value in suite.base.state_dict().items()}
    method = DCMerge(density=0.5, scale=1.5)
    result = method.merge_models(suite.base, suite.experts)
    expected = add_up(suite.base, suite.experts, 1 / len(suite.experts))
    names = matrix_names(suite.base)
    linear = [n for n, m in suite.base.named_modules() if isinstance(m, nn.Linear)]
    assert set(names) <= {f"{name}.weight" for name in linear} and len(names) >= 8
    assert not any("embed" in name or "shared" in name for name in names)
    for name in names:
        weights = [weight_of(expert, name) for expert in suite.experts.values()]
        step = method.merged_step(torch.stack(weights) - weight_of(suite.base, name))
        expected.get_parameter(name).data = weight_of(suite.base, name) + 1.5 * step
    assert_same(result, expected)
    assert all(torch.equal(before[name], value) for name, value in suite.base.state_dict().items())


# --- ESM ---


def slow_directions(rows: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Principal components of stored output shifts, without centring."""
    _, s, v = torch.linalg.svd(rows @ step.T, full_matrices=True)
    energies = torch.zeros(len(step), dtype=WIDE)
    energies[: len(s)] = torch.where(s > 1e-7 * s[0], s.square() / len(rows), 0)
    return energies, v.T


def steps_of(tasks: int, m: int, n: int) -> tuple[list[Any], Tensor]:
    steps, norms, rank = [], [], m // tasks
    for task in range(tasks):
        step, rows = normal(task, m, n), normal(10 + task, 40, n)
        energies, u = output_directions(rows.T @ rows, step)
        steps.append((energies[:rank], u[:, :rank], (u.T @ step)[:rank]))
        norms.append(step.norm())
    return steps, torch.stack(norms)


@pytest.mark.parametrize("rank", [5, 2])
def test_esm_of_one_task_has_equal_singular_values_and_its_rank(rank: int) -> None:
    step, rows = normal(0, 8, rank) @ normal(1, rank, 5), normal(10, 40, 5)
    energies, u = output_directions(rows.T @ rows, step)
    merged = merged_step([(energies, u, u.T @ step)], step.norm()[None], 2.0)
    values = torch.linalg.svdvals(merged)
    expected = values[0] * (torch.arange(5) < rank)
    assert float((values - expected).abs().max()) <= rounding_of(u) * float(values[0])


def test_esm_does_not_depend_on_the_order_of_tasks_or_the_scale_of_energies() -> None:
    steps, norms = steps_of(3, 9, 6)
    expected = merged_step(steps, norms, 2.0)
    assert_close(merged_step(steps[::-1], norms.flip(0), 2.0), expected, 1e-9)
    scaled = [(7.0 * energies, u, v) for energies, u, v in steps]
    assert_close(merged_step(scaled, norms, 2.0), expected, 1e-9)


def test_esm_of_experts_equal_to_the_base_changes_nothing() -> None:
    steps = [(torch.zeros(2).double(), torch.eye(4, 2).double(), torch.zeros(2, 3).double())] * 2
    assert not merged_step(steps, torch.zeros(2).double(), 2.0).any()


def rows_into(model: nn.Module, batches: list, name: str) -> Tensor:
    calls = calls_of(model, name, lambda: [oracle.run(model, batch) for batch in batches])
    return torch.cat([args[0].flatten(0, -2) for args, _ in calls])


QKV = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj")


def test_esm_is_the_formula_on_stored_outputs_of_the_whole_experts() -> None:
    suite = clip_suite(sizes=(9, 5))
    method = ESM(samples_per_task=samples_in(suite), scale=1.5, polarization=1.0)
    result = method.merge_models(suite.base, suite.experts, suite.inputs)
    expected = add_up(suite.base, suite.experts, 1 / len(suite.experts))
    for ends in (QKV, ["self_attn.out_proj"], ["mlp.fc1"], ["mlp.fc2"]):
        modules = [[f"{block}.{end}" for end in ends] for block in suite.blocks]
        steps = [slow_step(suite, names) for names in modules]
        factors = relative(torch.stack([step.norm() for step in steps]))
        for names, step, factor in zip(modules, steps, factors, strict=True):
            for name, part in zip(names, step.chunk(len(names)), strict=True):
                start = weight_of(suite.base, f"{name}.weight")
                expected.get_parameter(f"{name}.weight").data = start + 1.5 * factor * part
    assert_same(result, expected)  # all else is the experts' mean


def slow_step(suite: Suite, modules: Sequence[str]) -> Tensor:
    """The merged step of modules with one input, before layers are scaled."""
    names, steps, norms = [f"{module}.weight" for module in modules], [], []
    for task, expert in suite.experts.items():
        step = torch.cat([weight_of(expert, n) - weight_of(suite.base, n) for n in names])
        energies, u = slow_directions(rows_into(expert, suite.inputs[task], modules[0]), step)
        rank = len(step) // len(suite.experts)
        steps.append((energies[:rank], u[:, :rank], (u.T @ step)[:rank]))
        norms.append(step.norm())
    return merged_step(steps, torch.stack(norms), 1.0)


@pytest.mark.parametrize("batch_first", [False, True])
def test_esm_of_fused_attention_is_that_of_its_parts(batch_first: bool) -> None:
    suite = clip_suite(sizes=(9, 5))
    method = ESM(samples_per_task=samples_in(suite))
    result = method.merge_models(suite.base, suite.experts, suite.inputs)
    base, expected, *experts = (
        converted(model, batch_first=batch_first)
        for model in (suite.base, result, *suite.experts.values())
    )
    images = {task: [b["pixel_values"] for b in batches] for task, batches in suite.inputs.items()}
    tower = method.merge_models(base, dict(zip(images, experts, strict=True)), images)
    assert_same(tower, expected)
