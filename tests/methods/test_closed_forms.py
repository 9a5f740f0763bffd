"""SWUDI, ReACT and LARV, written out slowly in float64."""

import math
from typing import Any

import pytest
import torch
from calibrations import assert_same
from fusion_bench.method.wudi.wudi import wudi_merging
from tiny_models import Suite, clip_suite, normal, t5_suite
from torch import Tensor, nn

from fusion_bench_featcal.lab import rivals
from fusion_bench_featcal.lab.rivals.corrections import CorrectionData

REPLAY = 1e-10


def assert_close(x: Tensor, y: Tensor, bound: float = REPLAY) -> None:
    assert float((x - y).norm()) <= bound * float(y.norm())


def steps_of(suite: Suite, name: str) -> list[Tensor]:
    start = suite.base.get_parameter(name).detach()
    return [expert.get_parameter(name).detach() - start for expert in suite.experts.values()]


# --- SWUDI


def system_of(steps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The matrices of WUDI's normal equation `T S = B`."""
    s, b = torch.zeros(steps[0].shape[1], steps[0].shape[1]).double(), 0 * steps[0]
    for step in steps:
        gram = sum(torch.outer(row, row) for row in step) / sum(
            float(x) ** 2 for x in step.view(-1)
        )
        s, b = s + gram, b + step @ gram
    return s, b


def flow(steps: list[Tensor], time: float) -> Tensor:
    """The gradient flow from the sum of the steps, as a power series of its time."""
    (s, b), start, total = system_of(steps), torch.stack(steps).sum(0), 0 * steps[0]
    term = b - start @ s
    for power in range(1, 100):
        term = term * time / power
        total = total + term
        term = -term @ s
    return start + total


@pytest.mark.parametrize("shape", [(7, 4), (4, 7)])
def test_swudi_is_the_gradient_flow_of_wudi_and_ends_in_its_solution(shape) -> None:
    steps = [normal(seed, *shape) for seed in range(3)]
    merged = lambda **settings: rivals.SWUDI(**settings).merged_step(torch.stack(steps))  # noqa: E731
    assert_close(merged(time=3.0, rank=1.0), flow(steps, 3.0))
    s, b = system_of(steps)
    assert_close(merged(time=1e12, rank=1.0) @ s, b, 1e-9)
    start, largest = torch.stack(steps).sum(0), torch.linalg.svd(s).U[:, :3]
    expected = start + (flow(steps, 3.0) - start) @ largest @ largest.T
    assert_close(merged(time=3.0, rank=3 / shape[1]), expected)


def test_swudi_without_settings_solves_for_as_many_directions_as_carry_the_spectrum() -> None:
    steps = [normal(seed, 2, 9) for seed in range(3)]
    (s, b), start = system_of(steps), torch.stack(steps).sum(0)
    _, values, directions = torch.linalg.svd(s)
    count = math.ceil(float(values.sqrt().sum()) ** 2 / float(values.sum()))
    assert 1 < count < 9
    kept = directions[:count].T
    merged = rivals.SWUDI().merged_step(torch.stack(steps))
    assert_close((merged - start) @ kept, (b - start @ s) @ kept / values[:count])
    assert_close((merged - start) @ kept @ kept.T, merged - start)


def test_fusion_benchs_wudi_approaches_the_solution_of_swudi() -> None:
    steps = 1e-4 * normal(0, 3, 6, 4)
    solution, gaps = rivals.SWUDI(time=1e12, rank=1.0).merged_step(steps), []
    for count in (1, 30, 300):
        vectors: Any = [{"w": step} for step in steps]
        merged = wudi_merging(vectors, "cpu", count)["w"].detach()
        gaps.append(float((merged - solution).norm() / (sum(steps) - solution).norm()))
    assert gaps[0] > 2 * gaps[1] > 4 * gaps[2]


# --- LARV


def slow_rank(x: Tensor) -> float:
    energies = torch.linalg.eigvalsh(x @ x.T).clamp_min(0)
    shares = [float(energy / energies.sum()) for energy in energies]
    return math.exp(-sum(share * math.log(share) for share in shares if share > 0))


def slow_gates(suite: Suite, blocks: list[str], names: list[str]) -> list[list[float]]:
    """The factor of each task in each block."""
    by_task = []
    for task in range(len(suite.experts)):
        contrasts, conflicts = [], []
        for block in blocks:
            contrast, conflict = [], []
            for name in [name for name in names if name.startswith(f"{block}.")]:
                w, d = suite.base.get_parameter(name).detach(), steps_of(suite, name)[task]
                contrast.append(slow_rank(w) / slow_rank(d))
                apart = (w @ d.T - d @ w.T).norm() + (w.T @ d - d.T @ w).norm()
                conflict.append(float(apart / 2 / w.norm() / d.norm()))
            contrasts.append(sum(contrast) / len(contrast))
            conflicts.append(sum(conflict) / len(conflict))
        mean = sum(conflicts) / len(blocks)
        deviation = math.sqrt(sum((c - mean) ** 2 for c in conflicts) / len(blocks))
        gates = []
        for number, (contrast, conflict) in enumerate(zip(contrasts, conflicts, strict=True), 1):
            soft = math.log1p(math.exp((conflict - mean) / deviation))
            score = contrast * math.sqrt(number / len(blocks)) / (1 + soft)
            gates.append(1 + 0.5 * math.tanh(3 * (score - 1)))
        by_task.append(gates)
    return [list(block_terms) for block_terms in zip(*by_task, strict=True)]


@pytest.mark.parametrize(("make", "over"), [(clip_suite, "iso_c"), (t5_suite, "task_arithmetic")])
def test_larv_scales_the_steps_of_each_task_and_block(make: Any, over: str) -> None:
    suite = make()
    linear = [n for n, m in suite.base.named_modules() if isinstance(m, nn.Linear)]
    names = [f"{name}.weight" for name in linear if name != "lm_head"]
    gates = dict(zip(suite.blocks, slow_gates(suite, suite.blocks, names), strict=True))
    expected = rivals.LARV(over=over, strength=0.0, family=suite.family).merge_models(
        suite.base, suite.experts
    )
    for name, parameter in expected.named_parameters():
        block = next((block for block in gates if name.startswith(f"{block}.")), None)
        factors = gates[block] if block else [1.0] * len(suite.experts)
        step = sum(f * step for f, step in zip(factors, steps_of(suite, name), strict=True))
        if over == "iso_c" and name in names:
            u, values, vt = torch.linalg.svd(step, full_matrices=False)
            step = sum(torch.outer(a, b) for a, b in zip(u.T, vt, strict=True)) * values.mean()
        elif over == "iso_c":
            step = step / len(suite.experts)
        parameter.data = suite.base.get_parameter(name) + 1.5 * step
    method = rivals.LARV(over=over, scale=1.5, family=suite.family)
    assert_same(method.merge_models(suite.base, suite.experts), expected, REPLAY)


# --- ReACT


def polar(x: Tensor) -> Tensor:
    """The orthogonal factor of a square matrix, by Newton's iteration."""
    for _ in range(100):
        x = (x + torch.linalg.inv(x).T) / 2
    return x


def rotation(merged: Tensor, expert: Tensor) -> Tensor:
    """The rotation of the samples' spans, and elsewhere the one nearest to the identity."""
    z, y = torch.linalg.qr(merged.T).Q, torch.linalg.qr(expert.T).Q
    sample_terms = y @ polar(y.T @ expert.T @ merged @ z) @ z.T
    eye = torch.eye(len(z)).double()
    return polar(sample_terms + (eye - y @ y.T) @ (eye - z @ z.T))


def replayed(pairs: list[tuple[Tensor, Tensor]], weights: list[float]) -> Tensor:
    """The matrix of the weighted tasks, sample by sample."""
    width = pairs[0][0].shape[1]
    eye = torch.eye(width).double()
    targets, grams = 0 * eye, 0 * eye
    for (merged, expert), weight in zip(pairs, weights, strict=True):
        cross = sum(torch.outer(y, z) for z, y in zip(merged, expert, strict=True))
        gram = sum(torch.outer(z, z) for z in merged)
        targets += weight * (cross + 0.1 * rotation(merged, expert))
        grams += weight * (gram + 0.1 * eye)
    return targets @ torch.linalg.inv(grams)


@pytest.mark.parametrize("samples", [30, 3])
def test_react_is_a_ridge_regression_with_a_rotation_as_anchor(samples: int) -> None:
    pairs = [(normal(i, samples, 6), normal(9 + i, samples, 6)) for i in range(3)]
    pairs = [(z, z @ normal(5, 6, 6) / 3 + y) for z, y in pairs]
    lessons, x = (
        {name: CorrectionData(z, [y]) for name, (z, y) in zip("abc", pairs, strict=True)},
        pairs[0][0],
    )
    one = rivals.ReACT(task_weights={"b": 3.0}).fit_all(lessons)[0]
    assert list(one) == ["*"]
    assert_close(one["*"][0](x), x @ replayed(pairs, [1, 3, 1]).T)
    with pytest.raises(ValueError, match=r"task_weights\.bb is unknown"):
        rivals.ReACT(task_weights={"bb": 3.0}).fit_all(lessons)
    by_task = rivals.ReACT(task_id=True).fit_all(lessons)[0]
    for (task, modules), pair in zip(by_task.items(), pairs, strict=True):
        assert task in lessons
        assert_close(modules[0](x), x @ replayed([pair], [1]).T)
