import pytest
import torch
from feature_problems import distance, normal, planted_drift
from torch.distributions import Normal, kl_divergence

from fusion_bench_featcal.methods import ProbSurgerySettings
from fusion_bench_featcal.methods.prob_surgery import (
    ProbSurgeryModule,
    initial_prob_surgery,
    kl_term,
    standard_normal_kl,
    train_prob_surgery,
)
from fusion_bench_featcal.methods.training import shuffled_batches, task_generator


def test_kl_term_equals_torch_distributions():
    mean, log_variance = normal(0, 7, 5).double(), normal(1, 7, 5).double()
    known = kl_divergence(Normal(mean, (0.5 * log_variance).exp()), Normal(0.0, 1.0))
    torch.testing.assert_close(standard_normal_kl(mean, log_variance), known.sum(dim=1).mean())


def test_before_training_the_mean_is_zero_and_the_variance_one():
    features = normal(0, 5, 24)
    module = initial_prob_surgery(24, ProbSurgerySettings())
    mean, log_variance = module.distribution(features)
    assert not mean.any()
    assert not log_variance.any()
    assert torch.equal(module.deployed()(features), features)
    assert standard_normal_kl(mean, log_variance) == 0


def test_deployed_module_subtracts_the_mean():
    parts = normal(0, 3, 6), normal(1, 6, 3), normal(2, 6, 3)
    module, features = ProbSurgeryModule(*parts, 0.0), normal(3, 4, 6)
    mean, _ = module.distribution(features)
    torch.testing.assert_close(module.deployed()(features), features - mean)
    assert sum(p.numel() for p in module.deployed().parameters()) == 2 * 3 * 6


def test_removes_a_planted_drift_of_low_rank():
    merged, expert = planted_drift()
    settings = ProbSurgerySettings(hidden=32, steps=300, learning_rate=2e-2)
    module = train_prob_surgery(merged[:256], expert[:256], settings).deployed()
    before, after = (
        distance(merged[256:], expert[256:]),
        distance(module(merged[256:]), expert[256:]),
    )
    assert after < 0.3 * before


def test_a_step_follows_the_objective_written_with_torch_distributions():
    merged, expert = planted_drift(samples=8)
    settings = ProbSurgerySettings(hidden=6, steps=3, kl_weight=0.05, batch_size=5)
    losses = []
    train_prob_surgery(
        merged, expert, settings, task="a", on_step=lambda _, loss: losses.append(loss)
    )
    module = initial_prob_surgery(merged.shape[1], settings, "a")
    optimizer = torch.optim.Adam(module.parameters(), lr=settings.learning_rate)
    noise = task_generator(settings.seed, "a", "noise")
    batches = shuffled_batches(len(merged), 5, 3, task_generator(settings.seed, "a", "batches"))
    for known, rows in zip(losses, batches, strict=True):
        mean, log_variance = module.distribution(merged[rows])
        drift = Normal(mean, (0.5 * log_variance).exp())
        draw = mean + drift.stddev * torch.randn(mean.shape, generator=noise)
        divergence = kl_divergence(drift, Normal(0.0, 1.0)).sum(dim=1).mean()
        loss = (merged[rows] - draw - expert[rows]).abs().mean() + 0.05 * divergence
        torch.testing.assert_close(loss.detach(), known)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_scaled_weight_is_the_published_one_at_the_size_of_clip_features():
    expert = torch.full((4, 512), 0.44)
    term = kl_term(expert, "scaled")
    assert term.weight == pytest.approx(1e-4, rel=0.01)
    assert kl_term(expert / 10, "scaled").weight == pytest.approx(term.weight / 10)
    assert kl_term(expert, 1e-4).weight == 1e-4
    assert kl_term(expert, 1e-4).log_variance == 0


def test_published_weight_does_harm_at_norm_one_and_the_scaled_one_does_not():
    merged, expert = planted_drift(samples=128, width=512)
    merged, expert = merged / merged.norm(dim=1).mean(), expert / merged.norm(dim=1).mean()
    before = distance(merged[128:], expert[128:])
    after = {}
    for weight in (1e-4, "scaled"):
        settings = ProbSurgerySettings(hidden=32, kl_weight=weight, steps=200)
        module = train_prob_surgery(merged[:128], expert[:128], settings).deployed()
        after[weight] = distance(module(merged[128:]), expert[128:])
    assert after[1e-4] > before
    assert after["scaled"] < before
