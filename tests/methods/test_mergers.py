"""RegMean, RegMean++ and LOT Merging: formulas and limits."""

from typing import Any

import oracle
import pytest
import torch
from calibrations import (
    EXACT,
    assert_same,
    calls_of,
    distance,
    gamma,
    samples_in,
)
from tiny_models import Suite, add_up, batched, clip_suite, listed, normal, t5_suite
from torch import Tensor, nn

from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.lab.rivals import Lot, RegMean, RegMeanPlusPlus
from fusion_bench_featcal.lab.rivals.regmean import shortest_solution

FIRST = "layers.0.0.weight"


def run(merger: Any, suite: Suite, **options: Any) -> nn.Module:
    options = {"family": suite.family, "samples_per_task": samples_in(suite)} | options
    method = merger(**options)
    return method.merge_models(suite.base, suite.experts, suite.inputs)


class Chain(nn.Module):
    """Blocks of one linear module each: its input is the block's input, in every model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def chain_suite() -> Suite:
    torch.manual_seed(0)
    inputs: dict[str, list] = {
        f"task_{i}": batched((1 + i) * normal(i, 40, 5), (25, 15)) for i in range(3)
    }
    return listed(Chain(), inputs, ["layers.0", "layers.1", "layers.2"], 0)


def rows_into(model: nn.Module, batches: list, name: str) -> Tensor:
    """Rows that a module receives over whole forward passes."""
    calls = calls_of(model, name, lambda: [oracle.run(model, batch) for batch in batches])
    return torch.cat([args[0].flatten(0, -2) for args, _ in calls])


def test_regmean_is_the_formula_on_features_of_the_whole_experts() -> None:
    suite = clip_suite(sizes=(9, 5))
    result = run(RegMean, suite, off_diagonal=0.3)
    expected, bound = add_up(suite.base, suite.experts, 1 / len(suite.experts)), EXACT
    linear = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
    for name in [name for name, _ in suite.base.named_modules() if name.endswith(linear)]:
        rows, right = 0, torch.zeros((), dtype=torch.float64)
        grams = right
        for task, expert in suite.experts.items():
            x = rows_into(expert, suite.inputs[task], name)
            gram = x.T @ x / len(x)
            gram, rows = 0.3 * gram + 0.7 * torch.diag(gram.diagonal()), max(rows, len(x))
            right = right + expert.get_parameter(f"{name}.weight").detach() @ gram
            grams = grams + gram
        expected.get_parameter(f"{name}.weight").data = right @ torch.linalg.inv(grams)
        rounding = gamma(len(grams) + rows, grams.dtype)
        bound = max(bound, rounding * float(torch.linalg.cond(grams)))
    assert bound < 1e-6
    assert_same(result, expected, bound)  # all else is the experts' mean


def test_regmean_plusplus_is_featcal_where_inputs_are_the_blocks_own() -> None:
    """Without expert features and anchor. Its first block is RegMean's, the last is not."""
    suite = chain_suite()
    settings = FeatCalSettings(
        ridge_lambda=0.0, mix_alpha=0.0, anchor_rho=1.0, calibrate_bias=False,
        samples_per_task=40, family=suite.family,
    )  # fmt: skip
    options = {"off_diagonal": 1.0, "task_weights": "unit_gram"}
    merged_model, plain = (run(merger, suite, **options) for merger in (RegMeanPlusPlus, RegMean))
    calibrated = calibrate(plain, None, suite.experts, suite.inputs, settings, progress=False)
    # FeatCal's stabiliser pulls by 1e-8 over the least eigenvalue, which is above 1e-3 here.
    assert_same(merged_model, calibrated.model, 1e-5)
    assert_same(merged_model.get_submodule("layers.0"), plain.get_submodule("layers.0"))
    assert distance(merged_model.get_submodule("layers.2"), plain.get_submodule("layers.2")) > 1e-3


@pytest.mark.parametrize(("cutoff", "rank"), [(0.0, 5), (1e-3, 4)])
def test_lot_scales_steps_from_the_base_and_cuts_weak_directions(cutoff: float, rank: int) -> None:
    suite = chain_suite()
    for batches in suite.inputs.values():
        for batch in batches:  # two channels that hardly differ
            batch[:, 4] = batch[:, 3] + 0.01 * batch[:, 4]
    result = run(Lot, suite, scale=1.5, cutoff=cutoff)
    start = suite.base.get_parameter(FIRST).detach()
    right, gram = torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    for task, expert in suite.experts.items():
        x = torch.cat(suite.inputs[task])
        gram += x.T @ x / len(x)
        right += (expert.get_parameter(FIRST).detach() - start) @ x.T @ x / len(x)
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
    bound = gamma(len(gram) + rows, gram.dtype) * float(energies[0] / energies[rank - 1])
    gap = (result.get_parameter(FIRST) - expected).norm()
    assert gap <= bound * (sizes.max() / sizes.min()) * expected.norm() and bound < 1e-6
    bias, scaled = "layers.1.0.bias", add_up(suite.base, suite.experts, 0.5)
    torch.testing.assert_close(result.get_parameter(bias), scaled.get_parameter(bias))


def test_lot_weights_gains_by_energy() -> None:
    suite = clip_suite(sizes=(9, 5))
    result = run(Lot, suite)
    modules = dict(suite.base.named_modules())
    norms = [name for name, module in modules.items() if isinstance(module, nn.LayerNorm)]
    for name in [name for name in norms if ".layers." in name]:
        energies = right = torch.zeros((), dtype=torch.float64)
        start = suite.base.get_parameter(f"{name}.weight").detach()
        for task, expert in suite.experts.items():
            x = rows_into(expert, suite.inputs[task], name)
            energy = nn.functional.layer_norm(x, x.shape[-1:], eps=1e-5).square().mean(0)
            right = right + energy * (expert.get_parameter(f"{name}.weight") - start).detach()
            energies = energies + energy
        weight = result.get_parameter(f"{name}.weight")
        expected = start + Lot().scale * right / energies
        torch.testing.assert_close(weight, expected, rtol=EXACT, atol=EXACT)


def test_tied_embeddings_move_once() -> None:
    suite = t5_suite()
    result = run(Lot, suite, family="auto", scale=1.5)
    expected = add_up(suite.base, suite.experts, 1.5 / len(suite.experts))
    name = "shared.weight"
    torch.testing.assert_close(result.get_parameter(name), expected.get_parameter(name))


def test_rounding_of_the_sums_counts_as_unseen() -> None:
    almost_alike = torch.ones(2, 2, dtype=torch.float64) + 1e-9 * torch.eye(2, dtype=torch.float64)
    right = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    assert shortest_solution(almost_alike, right, precision=torch.float32).abs().max() < 1
    assert shortest_solution(almost_alike, right, precision=torch.float64).abs().max() > 1e8
    small = torch.diag(torch.tensor([1.0, 1e-12], dtype=torch.float64))  # channels of other sizes
    assert shortest_solution(small, right.flip(1), precision=torch.float32)[0, 1] == 2e12
