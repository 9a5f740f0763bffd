"""RegMean, RegMean++, LOT Merging, DC-Merge and ESM: formulas and limits."""

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from calibrations import EXACT, assert_same, calls_of, distance, gamma, samples_in
from tiny_models import Suite, add_up, batched, clip_suite, listed, normal, t5_suite
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.lab import rivals

WIDE = torch.float64
FIRST = "layers.0.0.weight"


def run(merger: Any, suite: Suite, **options: Any) -> nn.Module:
    options = {"family": suite.family, "samples_per_task": samples_in(suite)} | options
    return merger(**options).merge_models(suite.base, suite.experts, suite.inputs)


class Chain(nn.Module):
    """Blocks of one linear module each: its input is the block's input, in every model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain_suite(tasks: int = 3) -> Suite:
    torch.manual_seed(0)
    inputs: dict[str, list] = {
        f"task_{i}": batched((1 + i) * normal(i, 40, 5), (25, 15)) for i in range(tasks)
    }
    return listed(Chain(), inputs, ["layers.0", "layers.1", "layers.2"], 0)


def mean_of(suite: Suite) -> nn.Module:
    return add_up(suite.base, suite.experts, 1 / len(suite.experts))


def weight_of(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def rows_into(model: nn.Module, batches: list, name: str) -> Tensor:
    """Rows that a module receives over whole forward passes."""
    calls = calls_of(model, name, lambda: [oracle.run(model, batch) for batch in batches])
    return torch.cat([args[0].flatten(0, -2) for args, _ in calls])


def test_regmean_is_the_formula_on_features_of_the_whole_experts() -> None:
    suite = clip_suite(sizes=(9, 5))
    result, expected, bound = run(rivals.RegMean, suite, off_diagonal=0.3), mean_of(suite), EXACT
    linear = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    for name in [name for name, _ in suite.base.named_modules() if name.endswith(linear)]:
        rows, right = 0, torch.zeros((), dtype=WIDE)
        grams = right
        for task, expert in suite.experts.items():
            x = rows_into(expert, suite.inputs[task], name)
            gram = x.T @ x / len(x)
            gram, rows = 0.3 * gram + 0.7 * torch.diag(gram.diagonal()), max(rows, len(x))
            right = right + weight_of(expert, f"{name}.weight") @ gram
            grams = grams + gram
        expected.get_parameter(f"{name}.weight").data = right @ torch.linalg.inv(grams)
        rounding = gamma(len(grams) + rows, WIDE)
        bound = max(bound, rounding * float(torch.linalg.cond(grams)))
    assert bound < 1e-6
    assert_same(result, expected, bound)  # all else is the experts' mean


@pytest.mark.parametrize("merger", [rivals.RegMean, rivals.Lot])
def test_an_overflow_is_named_with_task_and_module(merger: Any) -> None:
    suite = chain_suite()
    suite.inputs["task_1"] = [1e200 * batch for batch in suite.inputs["task_1"]]
    with pytest.raises(CalibrationError, match=r"task_1, block layers\.0, module layers\.0\.0"):
        run(merger, suite)


def test_regmean_plusplus_is_featcal_where_inputs_are_the_blocks_own() -> None:
    """Without expert features and anchor. Its first block is RegMean's, the last is not."""
    suite = chain_suite()
    settings = FeatCalSettings(
        ridge_lambda=0.0, mix_alpha=0.0, anchor_rho=1.0, calibrate_bias=False,
        samples_per_task=40, family=suite.family,
    )  # fmt: skip
    options = {"off_diagonal": 1.0, "task_weights": "unit_gram"}
    mergers = rivals.RegMeanPlusPlus, rivals.RegMean
    merged_model, plain = (run(merger, suite, **options) for merger in mergers)
    calibrated = calibrate(plain, None, suite.experts, suite.inputs, settings, progress=False)
    # FeatCal's stabiliser pulls by 1e-8 over the least eigenvalue, which is above 1e-3 here.
    assert_same(merged_model, calibrated.model, 1e-5)
    assert_same(merged_model.get_submodule("layers.0"), plain.get_submodule("layers.0"))
    assert distance(merged_model.get_submodule("layers.2"), plain.get_submodule("layers.2")) > 1e-3


def test_lot_scales_the_shortest_solution_and_cuts_weak_directions() -> None:
    suite, cutoff, rank = chain_suite(), 1e-3, 4
    for batches in suite.inputs.values():
        for batch in batches:  # two channels that hardly differ
            batch[:, 4] = batch[:, 3] + 0.01 * batch[:, 4]
    result, start = run(rivals.Lot, suite, scale=1.5, cutoff=cutoff), weight_of(suite.base, FIRST)
    right, gram = torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    for task, expert in suite.experts.items():
        x = torch.cat(suite.inputs[task])
        gram += x.T @ x / len(x)
        right += (weight_of(expert, FIRST) - start) @ x.T @ x / len(x)
    sizes = gram.diagonal().sqrt()
    correlations = gram / sizes / sizes[:, None]
    inverse = torch.linalg.pinv(correlations, rtol=cutoff, hermitian=True)
    assert torch.linalg.matrix_rank(inverse, hermitian=True) == rank
    # Of all solutions the shortest.
    directions = torch.linalg.svd(correlations).U[:, :rank] * sizes[:, None]
    step = right / sizes @ inverse / sizes @ directions @ torch.linalg.pinv(directions)
    expected = start + 1.5 * step
    energies = torch.linalg.svdvals(correlations)
    rows = max(len(torch.cat(batches)) for batches in suite.inputs.values())
    bound = gamma(len(gram) + rows, WIDE) * float(energies[0] / energies[rank - 1])
    gap = (weight_of(result, FIRST) - expected).norm()
    assert gap <= bound * (sizes.max() / sizes.min()) * expected.norm() and bound < 1e-6
    bias, scaled = "layers.1.0.bias", add_up(suite.base, suite.experts, 0.5)
    torch.testing.assert_close(weight_of(result, bias), weight_of(scaled, bias))


# --- DC-Merge ---


def rounding_of(*matrices: Tensor) -> float:
    """Bound of the relative rounding error of a few products and decompositions."""
    return 100 * gamma(max(max(x.shape) for x in matrices), WIDE)


def assert_close(x: Tensor, y: Tensor, bound: float) -> None:
    assert bound < 1e-6 and float((x - y).norm()) <= bound * float(y.norm())


def orthogonal(seed: int, *shape: int) -> Tensor:
    return torch.linalg.qr(normal(seed, *shape)).Q


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_dc_merge_of_one_task_is_its_step_or_the_best_one_of_lower_rank(shape) -> None:
    step = normal(0, 1, *shape)
    assert_close(rivals.DCMerge(density=1.0).merged_step(step), step[0], rounding_of(step))
    u, s, v = torch.linalg.svd(step[0], full_matrices=False)
    few = rivals.DCMerge(density=3 / 16).merged_step(step)
    assert_close(few, (u[:, :3] * s[:3]) @ v[:3], rounding_of(step))


def test_smoothing_keeps_the_sum_of_singular_values_and_the_rank() -> None:
    step = (orthogonal(0, 8, 3) * torch.tensor([9.0, 2, 1], dtype=WIDE)) @ orthogonal(1, 6, 3).T
    for smoothing, expected in (("average", (4, 4, 4)), ("linear", (20 / 3, 4, 4 / 3))):
        method = rivals.DCMerge(density=1.0, smoothing=smoothing, ratio=5.0)
        values = torch.linalg.svdvals(method.merged_step(step[None]))
        assert_close(values, torch.tensor([*expected, 0, 0, 0], dtype=WIDE), rounding_of(step))


def test_dc_merge_of_models_averages_all_but_linear_weights() -> None:
    suite = t5_suite()
    method, expected = rivals.DCMerge(density=0.5, scale=1.5), mean_of(suite)
    linear = [n for n, m in suite.base.named_modules() if isinstance(m, nn.Linear)]
    names = [f"{name}.weight" for name in linear if name != "lm_head"]  # the embedding, tied
    assert len(names) >= 8
    for name in names:
        start = weight_of(suite.base, name)
        weights = [weight_of(expert, name) for expert in suite.experts.values()]
        step = method.merged_step(torch.stack(weights) - start)
        expected.get_parameter(name).data = start + 1.5 * step
    assert_same(method.merge_models(suite.base, suite.experts), expected)


# --- ESM ---


@pytest.mark.parametrize("rank", [5, 2])
def test_esm_of_one_task_has_equal_singular_values_and_its_rank(rank: int) -> None:
    suite, step = chain_suite(tasks=1), normal(0, 5, rank) @ normal(1, rank, 5)
    start = weight_of(suite.base, FIRST)
    suite.experts["task_0"].get_parameter(FIRST).data = start + step
    values = torch.linalg.svdvals(weight_of(run(rivals.ESM, suite), FIRST) - start)
    expected = values[0] * (torch.arange(5) < rank)
    assert float((values - expected).abs().max()) <= rounding_of(step) * float(values[0])


QKV = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj")
POWER = 1.5


def test_esm_is_the_formula_on_stored_outputs_of_the_whole_experts() -> None:
    suite = clip_suite(sizes=(9, 5))
    result, expected = run(rivals.ESM, suite, scale=1.5, polarization=POWER), mean_of(suite)
    for ends in (QKV, ["self_attn.out_proj"], ["mlp.fc1"], ["mlp.fc2"]):
        modules = [[f"{block}.{end}" for end in ends] for block in suite.blocks]
        steps = [slow_step(suite, names) for names in modules]
        factors = over_mean(torch.stack([step.norm() for step in steps])) ** POWER
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
    us, vs = [], []
    weights = over_mean(torch.stack(norms)) ** POWER
    for (energies, u, coordinates), weight in zip(steps, weights, strict=True):
        spectrum, has_energy = over_mean(energies**0.15), energies > 0
        us.append((u * spectrum)[:, has_energy])
        vs.append((weight * spectrum[:, None] * coordinates)[has_energy])
    u, v, most = torch.cat(us, 1), torch.cat(vs), sum(len(energies) for energies, _, _ in steps)
    v = v * over_mean(v.norm(dim=0)) ** POWER
    (a, s, b), (c, t, d) = (torch.linalg.svd(x, full_matrices=False) for x in (u, v))
    return a @ b @ c @ d * s.sum() / min(len(u), most) * t.sum() / min(v.shape[1], most)


def over_mean(values: Tensor) -> Tensor:
    return values / values.mean()


def slow_directions(rows: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Principal components of stored output shifts, without centring."""
    _, s, v = torch.linalg.svd(rows @ step.T, full_matrices=True)
    energies = torch.zeros(len(step), dtype=WIDE)
    energies[: len(s)] = torch.where(s > 1e-7 * s[0], s.square() / len(rows), 0)
    return energies, v.T
