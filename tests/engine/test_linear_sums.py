"""The engine's sums, formed in place and by halves, give what the definitions in `core` give."""

import pytest
import torch
from torch import Tensor

from fusion_bench_featcal.core import FoldedLinear, linear_moments, solve_bias, solve_linear
from fusion_bench_featcal.core.triangle import mirror_lower
from fusion_bench_featcal.engine import linear_sums, products
from fusion_bench_featcal.engine.linear_sums import LinearSums, outputs_are_few

EXACT = 1e-12
ALPHA, LAMBDA, WIDTH = 0.3, 0.05, 12
KNOBS = {"mix_alpha": ALPHA, "ridge_lambda": LAMBDA, "eps": 1e-8}


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch):
    """Chunks and strips small enough for a small problem to need several of each."""
    monkeypatch.setattr(linear_sums, "CHUNK_ROWS", 8)
    monkeypatch.setattr(linear_sums, "DIRECT_ROWS", 6)
    monkeypatch.setattr(linear_sums, "MOST_ROWS", 10)
    monkeypatch.setattr(products, "SMALL", 2)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def row_weights(kind: str, rows: int) -> Tensor | None:
    if kind == "none":
        return None
    mask = (torch.arange(rows) % 4 > 0).double()
    return mask if kind == "mask" else mask * torch.linspace(0.1, 2, rows).double()


def summed(cal: Tensor, exp: Tensor | None, p: Tensor | None, **options) -> LinearSums:
    """Sums over batches that end within chunks, fill some and are longer than others."""
    sums = LinearSums(cal, **options)
    for part in torch.arange(len(cal)).split([3, 21, 5, 0, len(cal) - 29]):
        sums.add(cal[part], None if exp is None else exp[part], None if p is None else p[part])
    return sums


@pytest.mark.parametrize("kind", ["none", "mask", "weights"])
def test_means_are_those_of_the_definition(kind: str):
    cal, exp, p = draw(40, WIDTH, seed=0), draw(40, WIDTH, seed=1), row_weights(kind, 40)
    wanted = linear_moments(cal, exp, p)
    weights = {"few": draw(2, WIDTH, seed=2), "fewer": draw(1, WIDTH, seed=3)}
    for expert_weights in (None, weights):
        sums = summed(cal, exp, p, mix_alpha=ALPHA, expert_weights=expert_weights)
        sums.close()
        torch.testing.assert_close(sums.weight, wanted.weight, rtol=EXACT, atol=0)
        found = sums.means()
        mirror_lower(found.gram)
        pairs = [
            (found.gram, wanted.gram / wanted.weight),
            (found.mean_cal, wanted.sum_cal / wanted.weight),
            (found.mean_target, wanted.mean_target(ALPHA)),
        ]
        if expert_weights is None:
            assert found.shift is not None and not found.reached
            pairs.append((found.gram + found.shift, wanted.cross(ALPHA).T))
        else:
            assert found.shift is None
            pairs += [(found.reached[n], w @ wanted.cross(ALPHA)) for n, w in weights.items()]
        for value, expected in pairs:
            torch.testing.assert_close(value, expected, rtol=0, atol=EXACT)
        assert torch.equal(found.gram, found.gram.T)


def test_equal_features_leave_no_shift_at_all():
    cal = draw(40, WIDTH, seed=4).float()
    means = summed(cal, cal.clone(), None, mix_alpha=ALPHA, expert_weights=None).means()
    assert means.shift is not None and not means.shift.any()


def test_rows_are_copied_while_they_wait():
    cal = draw(5, WIDTH, seed=5)
    sums = LinearSums(cal, mix_alpha=0.0, expert_weights=None)
    wanted = cal.T @ cal / 5
    sums.add(cal, None, None)
    cal.zero_()
    torch.testing.assert_close(sums.means().gram.tril(), wanted.tril(), rtol=0, atol=EXACT)


def test_a_part_goes_its_own_way():
    cal, exp = draw(40, WIDTH, seed=6), draw(40, WIDTH, seed=7)
    weights = {"a": draw(2, WIDTH, seed=8), "b": draw(3, WIDTH, seed=9)}
    whole = LinearSums(cal, mix_alpha=ALPHA, expert_weights=weights)
    whole.add(cal[:19], exp[:19], None)
    part = whole.restricted(["a"])
    part.add(cal[19:], exp[19:], None)
    wanted = linear_moments(cal, exp).cross(ALPHA)
    found = part.means().reached
    assert list(found) == ["a"]
    torch.testing.assert_close(found["a"], weights["a"] @ wanted, rtol=0, atol=EXACT)
    short = linear_moments(cal[:19], exp[:19]).cross(ALPHA)
    torch.testing.assert_close(whole.means().reached["b"], weights["b"] @ short, rtol=0, atol=EXACT)


@pytest.mark.parametrize("forms", ["rows", "moments", "rows first", "moments first"])
def test_either_form_in_any_task_gives_the_solution(forms: str):
    experts = {f"task_{i}": draw(3, WIDTH, seed=20 + i) for i in range(3)}
    biases = {task: draw(3, seed=30 + i) for i, task in enumerate(experts)}
    inputs = {
        task: (draw(40, WIDTH, seed=40 + i), draw(40, WIDTH, seed=50 + i))
        for i, task in enumerate(experts)
    }
    anchor, bias_anchor = draw(3, WIDTH, seed=60), draw(3, seed=61)
    folded = FoldedLinear({"only": anchor}, mix_alpha=ALPHA, eps=1e-8)
    for index, (task, weight) in enumerate(experts.items()):
        by_rows = forms == "rows" or forms == ("moments first" if index else "rows first")
        chosen = {"only": weight} if by_rows else None
        means = summed(*inputs[task], None, mix_alpha=ALPHA, expert_weights=chosen).means()
        folded.add_means(task, means, {"only": weight}, {"only": biases[task]})
    moments = {task: linear_moments(*pair) for task, pair in inputs.items()}
    wanted = solve_linear(moments, experts, anchor, **KNOBS)
    found = folded.solve("only", ridge_lambda=LAMBDA)
    torch.testing.assert_close(found.weight, wanted.weight, rtol=0, atol=1e-10)
    wanted_bias = solve_bias(
        moments,
        experts,
        biases,
        wanted.weight,
        wanted.task_weights,
        bias_anchor,
        mix_alpha=ALPHA,
        ridge_lambda=LAMBDA,
    )
    bias = folded.solve_bias("only", found.weight, bias_anchor, ridge_lambda=LAMBDA)
    torch.testing.assert_close(bias, wanted_bias, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["none", "mask", "weights"])
def test_sums_from_the_experts_outputs_are_those_of_the_definition(kind: str):
    cal, exp, p = draw(40, WIDTH, seed=0), draw(40, WIDTH, seed=1), row_weights(kind, 40)
    weights = {"a": draw(2, WIDTH, seed=2), "b": draw(3, WIDTH, seed=3)}
    sums = LinearSums(cal, mix_alpha=ALPHA, expert_weights=weights, from_outputs=True)
    assert sums.takes_outputs_of == ("a", "b")
    for part in torch.arange(40).split([3, 21, 5, 11]):
        outputs = [exp[part] @ weight.T for weight in weights.values()]
        sums.add(cal[part], exp[part], None if p is None else p[part], outputs)
    found, wanted = sums.means(), linear_moments(cal, exp, p)
    mirror_lower(found.gram)
    for name, weight in weights.items():
        torch.testing.assert_close(
            found.reached[name], weight @ wanted.cross(ALPHA), rtol=0, atol=EXACT
        )
    target = wanted.mean_target(ALPHA)
    torch.testing.assert_close(found.mean_target, target, rtol=0, atol=EXACT)
    torch.testing.assert_close(found.gram, wanted.gram / wanted.weight, rtol=0, atol=EXACT)


def test_modules_that_part_keep_what_waited_of_their_outputs():
    cal, exp = draw(13, WIDTH, seed=6), draw(13, WIDTH, seed=7)
    weights = {"a": draw(2, WIDTH, seed=8), "b": draw(3, WIDTH, seed=9)}
    whole = LinearSums(cal, mix_alpha=ALPHA, expert_weights=weights, from_outputs=True)
    whole.add(cal[:5], exp[:5], None, [exp[:5] @ weight.T for weight in weights.values()])
    part = whole.restricted(["b"])
    part.add(cal[5:], exp[5:], None, [exp[5:] @ weights["b"].T])
    wanted = weights["b"] @ linear_moments(cal, exp).cross(ALPHA)
    torch.testing.assert_close(part.means().reached["b"], wanted, rtol=0, atol=EXACT)


def test_rows_are_chosen_where_outputs_are_few():
    assert outputs_are_few([draw(3, WIDTH, seed=0), draw(3, WIDTH, seed=1)])
    assert not outputs_are_few([draw(4, WIDTH, seed=0), draw(3, WIDTH, seed=1)])


def test_rows_of_two_shapes_are_refused():
    cal = draw(5, WIDTH, seed=70)
    sums = LinearSums(cal, mix_alpha=ALPHA, expert_weights=None)
    with pytest.raises(ValueError, match=r"\(5, 12\).*\(4, 12\)"):
        sums.add(cal, cal[:4], None)
