"""LOT Merging: RegMean without shrinkage where inputs are seen, the base where they are not."""

import copy
from typing import Any

import pytest
import torch
from calibrations import assert_same, replay, samples_in
from chain_models import chain_suite
from fusion_bench_mergers import SAMPLES, FewSamplesPool
from tiny_models import Suite, clip_suite, residual_suite
from torch import Tensor, nn

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.methods.lot import lot
from fusion_bench_featcal.methods.regmean import regmean
from fusion_bench_featcal.methods.standalone import LotAlgorithm


def run(merge, suite: Suite, **options) -> nn.Module:
    settings = FeatCalSettings(samples_per_task=samples_in(suite), family=replay(suite))
    return merge(suite.base, suite.experts, suite.inputs, settings, progress=False, **options)


def test_is_regmean_without_shrinkage_where_all_inputs_are_seen() -> None:
    suite = chain_suite()
    assert_same(run(lot, suite), run(regmean, suite, off_diagonal=1.0), bound=1e-7)


def test_unseen_directions_stay_at_the_base() -> None:
    """Inputs of the first block lie in two of its five dimensions."""
    suite = chain_suite()
    for batches in suite.inputs.values():
        for batch in batches:
            batch[:, 2:] = 0
    found, mean = run(lot, suite), run(regmean, suite, off_diagonal=1.0)
    weight = "layers.0.0.weight"
    base = suite.base.get_parameter(weight).detach()
    torch.testing.assert_close(found.get_parameter(weight)[:, 2:], base[:, 2:])
    torch.testing.assert_close(
        found.get_parameter(weight)[:, :2], mean.get_parameter(weight)[:, :2]
    )
    assert float((mean.get_parameter(weight).detach()[:, 2:] - base[:, 2:]).norm()) > 0.1


def test_gains_are_weighted_by_the_energy_of_their_channel() -> None:
    suite = residual_suite()
    found = run(lot, suite)
    name = "layers.0.norm"
    rows: dict[str, Tensor] = {}
    for task, expert in suite.experts.items():
        seen: list[Tensor] = []
        norm: Any = expert.get_submodule(name)
        handle = norm.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        for batch in suite.inputs[task]:
            expert(batch)
        handle.remove()
        rows[task] = nn.functional.layer_norm(torch.cat(seen), (6,), eps=norm.eps).detach()
    start = suite.base.get_parameter(f"{name}.weight")
    energy = {task: z.square().mean(0) for task, z in rows.items()}
    step = sum(
        energy[task] * (expert.get_parameter(f"{name}.weight") - start)
        for task, expert in suite.experts.items()
    )
    wanted = start + step / sum(energy.values())
    torch.testing.assert_close(found.get_parameter(f"{name}.weight"), wanted)
    shifts = [expert.get_parameter(f"{name}.bias") for expert in suite.experts.values()]
    torch.testing.assert_close(found.get_parameter(f"{name}.bias"), sum(shifts) / len(shifts))


def test_one_expert_is_reproduced_on_its_own_samples() -> None:
    suite = clip_suite(tasks=1)
    expert = suite.experts["task_0"]
    found = run(lot, suite)
    for batch in suite.inputs["task_0"]:
        torch.testing.assert_close(
            found(**batch).last_hidden_state, expert(**batch).last_hidden_state,
            rtol=1e-6, atol=1e-7,
        )  # fmt: skip


def test_experts_equal_to_the_base_change_nothing() -> None:
    suite = clip_suite()
    same = {task: copy.deepcopy(suite.base) for task in suite.experts}
    found = run(lot, Suite(suite.merged, suite.base, same, suite.inputs, suite.blocks))
    assert_same(found, suite.base, bound=1e-12)


def test_runs_on_a_pool() -> None:
    found = LotAlgorithm(samples_per_task=SAMPLES).run(FewSamplesPool())
    assert all(bool(torch.isfinite(parameter).all()) for parameter in found.parameters())


def test_options_of_regmean_are_unknown() -> None:
    with pytest.raises(ValueError, match=r"method\.off_diagonal is no setting"):
        LotAlgorithm(off_diagonal=0.5)
