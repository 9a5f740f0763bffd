"""Running sums, formed in place and by halves, give what whole matrices give."""

import pytest
import torch
from torch import Tensor

from fusion_bench_featcal.core import (
    LinearSums,
    LinearSystem,
    linear_moments,
    moments,
    products,
    solve_bias,
    solve_linear,
)
from fusion_bench_featcal.core.products import mirror_lower

EXACT = 1e-12
ALPHA, LAMBDA, WIDTH = 0.3, 0.05, 12
KNOBS = {"mix_alpha": ALPHA, "ridge_lambda": LAMBDA, "eps": 1e-8}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch):
    """Parts and strips small enough for a small problem to need several of each."""
    monkeypatch.setattr(moments, "MOST_ROWS", 10)
    monkeypatch.setattr(products, "SMALL", 2)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def row_weights(kind: str, rows: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = (torch.arange(rows) % 4 > 0).double()
    return mask if kind == "mask" else mask * torch.linspace(0.1, 2, rows).double()


def summed(cal: Tensor, exp: Tensor | None, p: Tensor | None, **options) -> LinearSums:
    """Sums over batches of unequal lengths."""
    sums = LinearSums(cal, **options)
    for part in torch.arange(len(cal)).split([3, 21, 5, 0, len(cal) - 29]):
        sums.add(cal[part], None if exp is None else exp[part], None if p is None else p[part])
    return sums


@pytest.mark.parametrize("kind", ["none", "weights"])
@pytest.mark.parametrize("few", [False, True])
def test_means_are_those_of_whole_matrices(kind: str, few: bool):
    cal, exp, p = draw(40, WIDTH, seed=0), draw(40, WIDTH, seed=1), row_weights(kind, 40)
    weights = {"few": draw(2, WIDTH, seed=2), "fewer": draw(1, WIDTH, seed=3)}
    expert_weights = weights if few else None
    found = summed(cal, exp, p, mix_alpha=ALPHA, expert_weights=expert_weights).means()
    mirror_lower(found.gram)
    share = torch.full((40,), 1 / 40, dtype=torch.float64) if p is None else p / p.sum()
    target = ALPHA * exp + (1 - ALPHA) * cal
    cross = (target * share[:, None]).T @ cal
    pairs = [
        (found.gram, (cal * share[:, None]).T @ cal),
        (found.mean_cal, share @ cal),
        (found.mean_target, share @ target),
    ]
    if few:
        assert found.shift is None
        pairs += [(found.reached[n], w @ cross) for n, w in weights.items()]
    else:
        assert found.shift is not None and not found.reached
        pairs.append((found.gram + found.shift, cross.T))
    for value, expected in pairs:
        torch.testing.assert_close(value, expected, rtol=0, atol=EXACT)
    assert torch.equal(found.gram, found.gram.T)


def test_equal_features_leave_no_shift_at_all():
    cal = draw(40, WIDTH, seed=4).float()
    means = summed(cal, cal.clone(), None, mix_alpha=ALPHA, expert_weights=None).means()
    assert means.shift is not None and not means.shift.any()


@pytest.mark.parametrize("by_rows", [False, True])
def test_either_form_gives_the_solution(by_rows: bool):
    experts = {f"task_{i}": draw(3, WIDTH, seed=20 + i) for i in range(3)}
    biases = {task: draw(3, seed=30 + i) for i, task in enumerate(experts)}
    inputs = {
        task: (draw(40, WIDTH, seed=40 + i), draw(40, WIDTH, seed=50 + i))
        for i, task in enumerate(experts)
    }
    anchor, bias_anchor = draw(3, WIDTH, seed=60), draw(3, seed=61)
    folded = LinearSystem({"only": anchor}, eps=1e-8)
    for task, weight in experts.items():
        chosen = {"only": weight} if by_rows else None
        means = summed(*inputs[task], None, mix_alpha=ALPHA, expert_weights=chosen).means()
        folded.fold(task, means, {"only": weight}, {"only": biases[task]})
    whole = {task: linear_moments(*pair) for task, pair in inputs.items()}
    wanted = solve_linear(whole, experts, anchor, **KNOBS)
    found = folded.solve(LAMBDA).weights["only"]
    torch.testing.assert_close(found, wanted.weight, rtol=0, atol=1e-10)
    wanted_bias = solve_bias(
        whole,
        experts,
        biases,
        wanted.weight,
        wanted.task_weights,
        bias_anchor,
        mix_alpha=ALPHA,
        ridge_lambda=LAMBDA,
    )
    bias = folded.solve_bias("only", found, bias_anchor, LAMBDA)
    torch.testing.assert_close(bias, wanted_bias, rtol=0, atol=1e-10)


def test_rows_are_chosen_where_outputs_are_few():
    for outputs, is_few in ((3, True), (4, False)):
        weights = {"a": draw(3, WIDTH, seed=0), "b": draw(outputs, WIDTH, seed=1)}
        sums = LinearSums(draw(1, WIDTH, seed=2), mix_alpha=ALPHA, expert_weights=weights)
        assert bool(sums.reached) == is_few


def test_rows_of_two_shapes_are_refused():
    cal = draw(5, WIDTH, seed=70)
    sums = LinearSums(cal, mix_alpha=ALPHA, expert_weights=None)
    with pytest.raises(ValueError, match=r"\(5, 12\).*\(4, 12\)"):
        sums.add(cal, cal[:4], None)
