import pytest
import torch
from feature_problems import distance, normal, planted_drift

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.methods import SurgerySettings
from fusion_bench_featcal.methods.surgery import SurgeryModule, initial_surgery, train_surgery
from fusion_bench_featcal.methods.training import shuffled_batches, task_generator

SHORT = SurgerySettings(rank=4, steps=20)


def test_corrects_nothing_before_training():
    features = normal(0, 5, 24)
    module = initial_surgery(24, SurgerySettings())
    assert torch.equal(module(features), features)
    assert module.down.shape == (16, 24)
    assert module.down.abs().max() <= 24**-0.5
    assert module.down.std().item() == pytest.approx(24**-0.5 / 3**0.5, rel=0.1)


def test_removes_a_planted_drift_of_low_rank():
    merged, expert = planted_drift()
    settings = SurgerySettings(rank=8, steps=300, learning_rate=2e-2)
    module = train_surgery(merged[:256], expert[:256], settings)
    before, after = (
        distance(merged[256:], expert[256:]),
        distance(module(merged[256:]), expert[256:]),
    )
    assert after < 0.1 * before


def test_drift_is_what_the_formula_says():
    down, up, features = normal(1, 3, 6), normal(2, 6, 3), normal(3, 4, 6)
    module = SurgeryModule(down, up)
    for row, corrected in zip(features, module(features), strict=True):
        torch.testing.assert_close(corrected, row - up @ (down @ row).clamp(min=0))


def test_trained_module_is_frozen_and_depends_on_seed_and_task_alone():
    merged, expert = planted_drift(samples=20)
    modules = {
        name: train_surgery(merged, expert, settings, task=task)
        for name, settings, task in (
            ("first", SHORT, "a"),
            ("again", SHORT, "a"),
            ("task", SHORT, "b"),
            ("seed", SurgerySettings(rank=4, steps=20, seed=1), "a"),
        )
    }
    assert not any(p.requires_grad for p in modules["first"].parameters())
    assert torch.equal(modules["first"].up, modules["again"].up)
    assert not torch.equal(modules["first"].up, modules["task"].up)
    assert not torch.equal(modules["first"].up, modules["seed"].up)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trains_where_the_caller_wants_no_gradients(mode):
    merged, expert = planted_drift(samples=20)
    known = train_surgery(merged, expert, SHORT)
    with mode():
        module = train_surgery(merged * 1, expert * 1, SHORT)
    assert torch.equal(module.up, known.up)


def test_reports_every_step():
    merged, expert = planted_drift(samples=20)
    seen = []
    train_surgery(merged, expert, SHORT, on_step=lambda step, loss: seen.append((step, loss)))
    assert [step for step, _ in seen] == list(range(1, 21))
    assert seen[-1][1] < seen[0][1]


def test_batches_shuffle_anew_in_each_pass_and_stop():
    batches = list(shuffled_batches(10, 4, 8, task_generator(0, "a", "batches")))
    assert [len(batch) for batch in batches] == [4, 4, 2, 4, 4, 2, 4, 4]
    passes = torch.cat(batches[:3]), torch.cat(batches[3:6])
    assert all(sorted(seen.tolist()) == list(range(10)) for seen in passes)
    assert not torch.equal(*passes)


def test_diverged_training_names_task_and_setting():
    merged, expert = planted_drift(samples=20)
    settings = SurgerySettings(rank=4, steps=5, learning_rate=1e30)
    with pytest.raises(CalibrationError, match=r"task 'a'.*method\.learning_rate \(now 1e\+30\)"):
        train_surgery(merged, expert, settings, task="a")


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
        train_surgery(merged, expert, SHORT, task="a")
