"""RegMean++: FusionBench's repaired class, and FeatCal's loop where both compute the same."""

import pytest
from calibrations import assert_same, distance, replay, samples_in
from chain_models import chain_suite
from fusion_bench_mergers import SAMPLES, FewSamplesPool, their_regmean_plusplus
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite
from torch import nn

from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.methods.regmean import regmean
from fusion_bench_featcal.methods.regmean_plusplus import regmean_plusplus
from fusion_bench_featcal.methods.standalone import RegMeanPlusPlusAlgorithm


def run(merge, suite: Suite, family=None, **options) -> nn.Module:
    settings = FeatCalSettings(samples_per_task=samples_in(suite), family=family or replay(suite))
    return merge(suite.base, suite.experts, suite.inputs, settings, progress=False, **options)


@pytest.mark.parametrize(("off_diagonal", "bound"), [(0.95, 1e-2), (0.5, 1e-3)])
def test_agrees_with_fusion_bench(off_diagonal, bound, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # where it keeps its zero-shot heads
    theirs = their_regmean_plusplus(off_diagonal)
    algorithm = RegMeanPlusPlusAlgorithm(off_diagonal=off_diagonal, samples_per_task=SAMPLES)
    for name, value in algorithm.run(FewSamplesPool()).state_dict().items():
        if "post_layernorm" not in name:  # there they keep the base
            # they invert in float32, and errors reach the blocks that follow
            assert float((value - theirs[name]).norm() / theirs[name].norm()) < bound, name


def test_is_featcal_without_expert_features_and_anchor_where_inputs_are_the_blocks_own() -> None:
    suite = chain_suite()
    settings = FeatCalSettings(
        ridge_lambda=0.0, mix_alpha=0.0, anchor_rho=1.0, eps=0.0, calibrate_bias=False,
        samples_per_task=40, family=replay(suite),
    )  # fmt: skip
    options = {"off_diagonal": 1.0, "task_weights": "unit_gram"}
    ours = run(regmean_plusplus, suite, **options)
    theirs = calibrate(
        run(regmean, suite), None, suite.experts, suite.inputs, settings, progress=False
    )
    assert_same(ours, theirs.model)
    assert distance(run(regmean, suite, **options), theirs.model) > 1e-3


def test_first_block_is_regmean_with_averaged_embeddings() -> None:
    """Nothing is merged before it but the embeddings, which are given alike to all experts here."""
    suite = residual_suite()
    for expert in suite.experts.values():
        expert.get_submodule("embed").load_state_dict(
            suite.base.get_submodule("embed").state_dict()
        )
    plus, plain = run(regmean_plusplus, suite), run(regmean, suite)
    assert_same(plus.get_submodule("layers.0"), plain.get_submodule("layers.0"))
    assert distance(plus.get_submodule("layers.2"), plain.get_submodule("layers.2")) > 1e-3


def test_running_blocks_alone_equals_replaying_the_model() -> None:
    suite = clip_suite(sizes=(9, 5))
    assert_same(run(regmean_plusplus, suite, family="clip"), run(regmean_plusplus, suite))


def test_padding_does_not_count() -> None:
    short, long = gpt2_suite(padded=6), gpt2_suite(padded=9)
    assert_same(run(regmean_plusplus, short), run(regmean_plusplus, long))


def test_misspelt_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"method\.off_diag .* nearest"):
        RegMeanPlusPlusAlgorithm(off_diag=1.0)
