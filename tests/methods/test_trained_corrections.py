"""Surgery and ProbSurgery on features: initial modules, objectives, training and its curves."""

from typing import Any

import pytest
import torch
from feature_problems import distance, normal, planted_drift
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab.rivals import ProbSurgery, Surgery
from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.lab.rivals.prob_surgery import kl_term, standard_normal_kl
from fusion_bench_featcal.lab.rivals.training import (
    CURVE_WINDOW,
    TaskFeatures,
    initial_surgery,
    shuffled_batches,
    task_generator,
    thinned,
)

SHORT: dict[str, Any] = {"rank": 4, "steps": 20}


@pytest.mark.parametrize(
    ("method", "left"),
    [
        (Surgery(rank=8, steps=300, learning_rate=2e-2), 0.1),
        (ProbSurgery(hidden=32, steps=300, learning_rate=2e-2), 0.3),
    ],
)
def test_removes_a_planted_drift_of_low_rank(method, left):
    merged, expert = planted_drift()
    module = method.fit(merged[:256], expert[:256], "a")
    merged, expert = merged[256:], expert[256:]
    assert distance(module(merged), expert) < left * distance(merged, expert)


def test_corrects_nothing_before_training():
    features = normal(0, 5, 24)
    module = initial_surgery(24, 16, task_generator(0, "a", "weights"))
    assert torch.equal(module(features), features)
    assert module.down.shape == (16, 24)
    assert module.down.abs().max() <= 24**-0.5
    assert module.down.std().item() == pytest.approx(24**-0.5 / 3**0.5, rel=0.1)


def test_drift_is_what_the_formula_says():
    down, up, features = normal(1, 3, 6), normal(2, 6, 3), normal(3, 4, 6)
    module = SurgeryModule(down, up)
    for row, corrected in zip(features, module(features), strict=True):
        torch.testing.assert_close(corrected, row - up @ (down @ row).clamp(min=0))


def test_trained_module_is_frozen_and_depends_on_seed_and_task_alone():
    merged, expert = planted_drift(samples=20)
    first, again, task, seed = (
        Surgery(**SHORT, seed=seed).fit(merged, expert, task)
        for seed, task in ((42, "a"), (42, "a"), (42, "b"), (1, "a"))
    )
    assert not any(p.requires_grad for p in first.parameters())
    assert torch.equal(first.up, again.up)
    assert not torch.equal(first.up, task.up)
    assert not torch.equal(first.up, seed.up)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trains_where_the_caller_wants_no_gradients(mode):
    merged, expert = planted_drift(samples=20)
    known = Surgery(**SHORT).fit(merged, expert)
    with mode():
        module = Surgery(**SHORT).fit(merged * 1, expert * 1)
    assert torch.equal(module.up, known.up)


def three_tasks(width=12) -> dict[str, TaskFeatures]:
    return {
        task: TaskFeatures(*planted_drift(samples=n, width=width))
        for task, n in (("a", 9), ("b", 20), ("c", 4))
    }


def untrained(method: Any, features: Tensor, task: str = "") -> Any:
    return method.module(TaskFeatures(features, features), task)


def test_joint_steps_move_every_module_as_one_adam_over_all_does():
    features = three_tasks()
    method = Surgery(**SHORT, batch_size=8)
    assert method.optimizer == "joint"
    modules = {
        task: initial_surgery(12, 4, task_generator(method.seed, task, "weights"))
        for task in features
    }
    batches = {
        task: shuffled_batches(len(f.merged), 8, 20, task_generator(method.seed, task, "batches"))
        for task, f in features.items()
    }
    # Adam by hand: one count of steps for a weight, from its first gradient on.
    weights = [w for module in modules.values() for w in module.parameters()]
    state = {id(w): (0, torch.zeros_like(w), torch.zeros_like(w)) for w in weights}
    for _ in range(20):
        for task, each in features.items():
            merged, expert = each.at(next(batches[task]))
            loss = (modules[task](merged) - expert).abs().mean()
            own = list(modules[task].parameters())
            gradients = dict(zip(map(id, own), torch.autograd.grad(loss, own), strict=True))
            for w in weights:
                count, first, second = state[id(w)]
                if count == 0 and id(w) not in gradients:
                    continue
                g = gradients.get(id(w), torch.zeros_like(w))
                count, first, second = (
                    count + 1,
                    0.9 * first + 0.1 * g,
                    0.999 * second + 0.001 * g**2,
                )
                state[id(w)] = count, first, second
                step = first / (1 - 0.9**count) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)
                w.data -= method.learning_rate * step
    found: dict[str, Any] = method.fit_all(features)
    alone: dict[str, Any] = Surgery(**SHORT, batch_size=8, optimizer="per_task").fit_all(features)
    for task, module in modules.items():
        torch.testing.assert_close(found[task].up, module.up, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(found[task].up, alone[task].up, rtol=1e-2)
        assert torch.equal(
            alone[task].up, method.fit(features[task].merged, features[task].expert, task).up
        )


def test_a_shared_module_is_trained_by_every_tasks_batches_in_turn():
    features = three_tasks()
    method = ProbSurgery(hidden=6, steps=4, batch_size=50, shared=True, kl_weight=0.0)
    found: dict[str, Any] = method.fit_all(features)
    assert len(set(map(id, found.values()))) == 1
    module = untrained(method, features["a"].merged, "shared")
    optimizer = torch.optim.Adam(module.parameters(), lr=method.learning_rate)
    noise = {task: task_generator(method.seed, task, "noise") for task in features}
    batches = {
        task: shuffled_batches(len(f.merged), 50, 4, task_generator(method.seed, task, "batches"))
        for task, f in features.items()
    }
    for step in range(4):
        for task, each in features.items():
            merged, expert = each.at(next(batches[task]))
            mean, log_variance = module.distribution(merged)
            draw = torch.randn(mean.shape, generator=noise[task]) * (log_variance / 2).exp()
            loss = (merged - mean - draw - expert).abs().mean()
            assert method.losses[task][step] == pytest.approx(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    torch.testing.assert_close(found["a"].up, module.mean.detach())


def test_a_shared_module_cannot_be_trained_task_by_task():
    with pytest.raises(ValueError, match=r"set method\.optimizer=joint"):
        ProbSurgery(shared=True, optimizer="per_task")


@pytest.mark.parametrize(("features", "wanted"), [(512, 16), (64, 2), (1024, 32), (8, 1)])
def test_relative_width_is_in_proportion_to_the_features(features, wanted):
    merged, expert = normal(0, 3, features), normal(1, 3, features)
    module = Surgery(width="relative", steps=1).fit(merged, expert)
    assert module.down.shape == (wanted, features)
    assert untrained(ProbSurgery(width="relative"), merged).down.shape == (
        8 * wanted if features > 8 else 2,
        features,
    )


def test_batches_shuffle_anew_in_each_pass_and_stop():
    batches = list(shuffled_batches(10, 4, 8, task_generator(0, "a", "batches")))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4, 4]
    passes = torch.cat(batches[:3]), torch.cat(batches[3:6])
    assert all(sorted(seen.tolist()) == list(range(10)) for seen in passes)
    assert not torch.equal(*passes)


def test_diverged_training_names_task_and_setting():
    with pytest.raises(CalibrationError, match=r"task 'a'.*method\.learning_rate \(now 1e\+30\)"):
        Surgery(rank=4, steps=5, learning_rate=1e30).fit(*planted_drift(samples=20), "a")


@pytest.mark.parametrize(
    ("merged", "expert", "message"),
    [
        (normal(0, 4, 6), normal(1, 5, 6), r"task 'a'.*\(4, 6\) and \(5, 6\)"),
        (normal(0, 4), normal(1, 4), r"must be \[samples, width\]"),
        (normal(0, 0, 6), normal(1, 0, 6), r"must be \[samples, width\]"),
        (normal(0, 4, 6) * torch.nan, normal(1, 4, 6), "merged model's features are not finite"),
        (normal(0, 4, 6), normal(1, 4, 6) / 0, "expert's features are not finite"),
    ],
)
def test_features_that_do_not_fit_are_refused(merged, expert, message):
    with pytest.raises(CalibrationError, match=message):
        Surgery(**SHORT).fit(merged, expert, "a")


def test_kl_term_equals_torch_distributions():
    mean, log_variance = normal(0, 7, 5).double(), normal(1, 7, 5).double()
    known = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, 1.0))
    torch.testing.assert_close(standard_normal_kl(mean, log_variance), known.sum(dim=1).mean())


def test_before_training_the_mean_is_zero_and_the_variance_one():
    features = normal(0, 5, 24)
    module = untrained(ProbSurgery(), features)
    mean, log_variance = module.distribution(features)
    assert not mean.any() and not log_variance.any()
    assert torch.equal(module.deployed()(features), features)


def test_a_step_follows_the_objective_written_with_torch_distributions():
    merged, expert = planted_drift(samples=8)
    method = ProbSurgery(hidden=6, steps=3, kl_weight=0.05, batch_size=5)
    method.fit(merged, expert, "a")
    module = untrained(method, merged, "a")
    optimizer = torch.optim.Adam(module.parameters(), lr=method.learning_rate)
    noise = task_generator(method.seed, "a", "noise")
    batches = shuffled_batches(len(merged), 5, 3, task_generator(method.seed, "a", "batches"))
    for known, rows in zip(method.losses["a"], batches, strict=True):
        mean, log_variance = module.distribution(merged[rows])
        drift = Normal(mean, (0.5 * log_variance).exp())
        draw = mean + drift.stddev * torch.randn(mean.shape, generator=noise)
        divergence = kl_divergence(drift, Normal(0.0, 1.0)).sum(dim=1).mean()
        loss = (merged[rows] - draw - expert[rows]).abs().mean() + 0.05 * divergence
        assert known == pytest.approx(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_scaled_weight_is_the_published_one_at_the_size_of_clip_features():
    expert = torch.full((4, 512), 0.44)
    term = kl_term(expert, "scaled")
    assert term.weight == pytest.approx(1e-4, rel=0.01)
    assert kl_term(expert / 10, "scaled").weight == pytest.approx(term.weight / 10)
    assert kl_term(expert, 1e-4) == (1e-4, 0)


def test_published_weight_does_harm_at_norm_one_and_the_scaled_one_does_not():
    merged, expert = planted_drift(samples=128, width=512)
    merged, expert = merged / merged.norm(dim=1).mean(), expert / merged.norm(dim=1).mean()
    before = distance(merged[128:], expert[128:])
    after = {}
    for weight in (1e-4, "scaled"):
        method = ProbSurgery(hidden=32, kl_weight=weight, steps=200)
        module = method.fit(merged[:128], expert[:128])
        after[weight] = distance(module(merged[128:]), expert[128:])
    assert after[1e-4] > before
    assert after["scaled"] < before


def test_a_point_before_training_and_one_for_every_window() -> None:
    first = [8.0, *[2.0] * (CURVE_WINDOW - 1)]
    assert thinned([*first, 1.0, 3.0]) == [
        (0, 8.0),
        (CURVE_WINDOW, (8.0 + 2.0 * (CURVE_WINDOW - 1)) / CURVE_WINDOW),
        (CURVE_WINDOW + 2, 2.0),
    ]
    assert thinned([]) == []


def test_the_first_loss_is_the_untrained_module_s() -> None:
    merged, expert = normal(0, 6, 4), normal(1, 6, 4)
    # One batch holds all samples, and the untrained module corrects nothing.
    method = Surgery(rank=2, steps=45, batch_size=6, learning_rate=0.05)
    method.fit(merged, expert, "a")
    losses = method.losses["a"]
    assert len(losses) == 45
    assert losses[0] == pytest.approx(distance(merged, expert), rel=1e-5)
    assert losses[-1] < 0.9 * losses[0]
