"""RegMean, RegMean++ and LOT Merging: formulas, FusionBench's results, FeatCal's limits."""

import copy
from typing import Any

import pytest
import torch
from calibrations import assert_identical, assert_same, distance, replay, samples_in
from fusion_bench_mergers import SAMPLES, FewSamplesPool, their_regmean, their_regmean_plusplus
from tiny_models import (
    Suite,
    add_up,
    batched,
    blocks_of,
    clip_model,
    clip_suite,
    gpt2_suite,
    normal,
    residual_suite,
    scatter,
    suite_of,
    t5_suite,
)
from tiny_open_clip import converted
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.lab.rivals import (
    AnchorOnly,
    Lot,
    RegMean,
    RegMeanAlgorithm,
    RegMeanPlusPlus,
    RegMeanPlusPlusAlgorithm,
)

MERGERS = pytest.mark.parametrize(
    "merger", [RegMean, RegMeanPlusPlus, Lot], ids=["regmean", "regmean_plusplus", "lot"]
)


PLAIN: dict[str, Any] = {"scale": 1.0, "cutoff": 0.0}


def run(merger: Any, suite: Suite, *, family: Any = None, **options: Any) -> nn.Module:
    method = merger(samples_per_task=samples_in(suite), family=family or replay(suite), **options)
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
    return suite_of(Chain(), inputs, ["layers.0", "layers.1", "layers.2"], 0)


def mean_of(suite: Suite) -> nn.Module:
    merged = copy.deepcopy(suite.base)
    states = [expert.state_dict() for expert in suite.experts.values()]
    merged.load_state_dict({name: sum(s[name] for s in states) / len(states) for name in states[0]})
    return merged


def module_inputs(model: nn.Module, batches: list, name: str) -> Tensor:
    """Rows that a module receives over whole forward passes."""
    rows: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: rows.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    with torch.no_grad():
        for batch in batches:
            model(**batch) if isinstance(batch, dict) else model(batch)
    handle.remove()
    return torch.cat(rows)


@pytest.mark.parametrize("off_diagonal", [0.95, 0.3])
def test_is_the_formula_on_features_of_the_whole_experts(off_diagonal: float) -> None:
    suite = clip_suite(sizes=(9, 5))
    found, mean = run(RegMean, suite, off_diagonal=off_diagonal), mean_of(suite)
    for block in blocks_of(suite.base, "CLIPEncoderLayer"):
        for name in ("self_attn.k_proj", "self_attn.out_proj", "mlp.fc2"):
            left = right = torch.zeros((), dtype=torch.float64)
            for task, expert in suite.experts.items():
                x = module_inputs(expert, suite.inputs[task], f"{block}.{name}")
                gram = x.T @ x / len(x)
                gram = off_diagonal * gram + (1 - off_diagonal) * torch.diag(gram.diagonal())
                left = left + expert.get_parameter(f"{block}.{name}.weight") @ gram
                right = right + gram
            wanted = left @ torch.linalg.inv(right)
            weight = f"{block}.{name}.weight"
            torch.testing.assert_close(found.get_parameter(weight), wanted, rtol=1e-7, atol=1e-9)
            mean.get_parameter(weight).data.copy_(found.get_parameter(weight))
        for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.fc1"):
            weight = f"{block}.{name}.weight"
            mean.get_parameter(weight).data.copy_(found.get_parameter(weight))
    assert_same(found, mean)  # all else is the experts' mean


@pytest.mark.parametrize(
    ("algorithm", "theirs", "bound"),
    [
        (RegMeanAlgorithm, their_regmean, 5e-4),
        (RegMeanPlusPlusAlgorithm, their_regmean_plusplus, 1e-3),
    ],
)
def test_agrees_with_fusion_bench(
    algorithm: Any, theirs: Any, bound: float, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where it keeps its zero-shot heads
    known = theirs(off_diagonal=0.5)
    pool = FewSamplesPool()
    ours = algorithm(off_diagonal=0.5, samples_per_task=SAMPLES).run(pool)
    for name, value in ours.state_dict().items():
        # they invert in float32; behind the last block RegMean++ keeps the base there
        if theirs is their_regmean or "post_layernorm" not in name:
            assert float((value - known[name]).norm() / known[name].norm()) < bound, name


@MERGERS
def test_padding_does_not_count_and_inputs_are_not_changed(merger: Any) -> None:
    suite = gpt2_suite(padded=6)
    before = copy.deepcopy((suite.base, suite.experts))
    assert_same(run(merger, suite), run(merger, gpt2_suite(padded=9)))
    assert_identical(suite.base, before[0])
    for task, expert in suite.experts.items():
        assert_identical(expert, before[1][task])


@pytest.mark.parametrize("make", [clip_suite, gpt2_suite, residual_suite])
def test_equal_experts_give_that_expert(make) -> None:
    suite = make()
    expert = next(iter(suite.experts.values()))
    alike = {task: expert for task in suite.experts}
    same = Suite(suite.merged, suite.base, alike, suite.inputs, suite.blocks)
    assert_same(run(RegMean, same), expert)


def test_values_of_the_base_do_not_matter() -> None:
    suite = residual_suite()
    other = Suite(suite.merged, suite.merged, suite.experts, suite.inputs, suite.blocks)
    assert_identical(run(RegMean, suite), run(RegMean, other))


def test_batches_and_order_of_tasks_do_not_matter() -> None:
    suite, once = clip_suite(sizes=(4, 3)), clip_suite(sizes=(7,))
    assert_same(run(RegMean, suite), run(RegMean, once))
    turned = Suite(
        suite.merged, suite.base, dict(reversed(suite.experts.items())), suite.inputs, suite.blocks
    )
    assert_same(run(RegMean, suite), run(RegMean, turned))


def test_unit_grams_change_the_weights_of_tasks_only() -> None:
    suite = residual_suite()
    weighted, equal = run(RegMean, suite, task_weights="unit_gram"), run(RegMean, suite)
    assert distance(weighted, equal) > 1e-3
    assert torch.equal(weighted.get_parameter("embed.weight"), equal.get_parameter("embed.weight"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"off_diagonal": 1.5}, r"method\.off_diagonal must be .* >= 0 and at most 1, got 1\.5"),
        ({"task_weights": "mine"}, r"method\.task_weights must be one of equal, unit_gram, got"),
        ({"samples_per_tsk": 3}, r"method\.samples_per_tsk .* 'samples_per_task'"),
        ({"samples_per_task": 0}, r"method\.samples_per_task must be an integer >= 1, got 0"),
        ({"ridge_lambda": 1.0}, r"method\.ridge_lambda is no setting"),
    ],
)
def test_bad_settings_are_named(keys, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RegMeanAlgorithm(**keys)


def test_pool_without_base_is_refused() -> None:
    pool = FewSamplesPool()
    del pool._models["_pretrained_"]
    with pytest.raises(CalibrationError, match=r"modelpool\.models\._pretrained_"):
        RegMeanAlgorithm().run(pool)


def test_is_featcal_without_expert_features_and_anchor_where_inputs_are_the_blocks_own() -> None:
    suite = chain_suite()
    settings = FeatCalSettings(
        ridge_lambda=0.0, mix_alpha=0.0, anchor_rho=1.0, eps=0.0, calibrate_bias=False,
        samples_per_task=40, family=replay(suite),
    )  # fmt: skip
    options = {"off_diagonal": 1.0, "task_weights": "unit_gram"}
    ours = run(RegMeanPlusPlus, suite, **options)
    theirs = calibrate(
        run(RegMean, suite), None, suite.experts, suite.inputs, settings, progress=False
    )
    assert_same(ours, theirs.model)
    assert distance(run(RegMean, suite, **options), theirs.model) > 1e-3


def test_first_block_is_regmean_with_averaged_embeddings() -> None:
    """Nothing is merged before it but the embeddings, which are given alike to all experts here."""
    suite = residual_suite()
    for expert in suite.experts.values():
        expert.get_submodule("embed").load_state_dict(
            suite.base.get_submodule("embed").state_dict()
        )
    plus, plain = run(RegMeanPlusPlus, suite), run(RegMean, suite)
    assert_same(plus.get_submodule("layers.0"), plain.get_submodule("layers.0"))
    assert distance(plus.get_submodule("layers.2"), plain.get_submodule("layers.2")) > 1e-3


def test_is_regmean_without_shrinkage_where_all_inputs_are_seen() -> None:
    suite = chain_suite()
    assert_same(run(Lot, suite, **PLAIN), run(RegMean, suite, off_diagonal=1.0), bound=1e-7)


def test_unseen_directions_stay_at_the_base() -> None:
    """Inputs of the first block lie in two of its five dimensions."""
    suite = chain_suite()
    for batches in suite.inputs.values():
        for batch in batches:
            batch[:, 2:] = 0
    found, mean = run(Lot, suite, **PLAIN), run(RegMean, suite, off_diagonal=1.0)
    weight = "layers.0.0.weight"
    base = suite.base.get_parameter(weight).detach()
    torch.testing.assert_close(found.get_parameter(weight)[:, 2:], base[:, 2:])
    torch.testing.assert_close(
        found.get_parameter(weight)[:, :2], mean.get_parameter(weight)[:, :2]
    )
    assert float((mean.get_parameter(weight).detach()[:, 2:] - base[:, 2:]).norm()) > 0.1


def test_gains_are_weighted_by_the_energy_of_their_channel() -> None:
    suite = residual_suite()
    found = run(Lot, suite, **PLAIN)
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
    found = run(Lot, suite, **PLAIN)
    for batch in suite.inputs["task_0"]:
        torch.testing.assert_close(
            found(**batch).last_hidden_state, expert(**batch).last_hidden_state,
            rtol=1e-6, atol=1e-7,
        )  # fmt: skip


def two_arrangements() -> tuple[Suite, Suite]:
    """The same models as transformers' vision towers, and as open_clip's with fused attention."""
    base = scatter(clip_model(seed=0).double(), 0, 0.15)
    experts = {f"task_{i}": scatter(base, i, 0.1) for i in (1, 2)}
    config: Any = base.config
    inputs = {
        task: [normal(i, 6, 3, config.image_size, config.image_size)]
        for i, task in enumerate(experts)
    }
    plain = Suite(add_up(base, experts, 0.4), base, experts, inputs, [])
    towers = {task: converted(expert) for task, expert in experts.items()}
    fused = Suite(converted(plain.merged), converted(base), towers, inputs, [])
    return plain, fused


def assert_same_towers(found: nn.Module, plain: nn.Module) -> None:
    wanted = converted(plain).state_dict()
    assert list(found.state_dict()) == list(wanted)
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(("cutoff", "seen"), [(0.0, 5), (1e-3, 4)])
def test_steps_from_the_base_are_scaled_and_weak_directions_cut(cutoff: float, seen: int) -> None:
    suite = chain_suite()
    for batches in suite.inputs.values():
        for batch in batches:  # two channels that hardly differ
            batch[:, 4] = batch[:, 3] + 0.01 * batch[:, 4]
    found = run(Lot, suite, scale=1.5, cutoff=cutoff)
    weight = "layers.0.0.weight"
    start = suite.base.get_parameter(weight).detach()
    right, gram = torch.zeros(5, 5).double(), torch.zeros(5, 5).double()
    for task, expert in suite.experts.items():
        x = torch.cat(suite.inputs[task])
        gram += x.T @ x / len(x)
        right += (expert.get_parameter(weight).detach() - start) @ x.T @ x / len(x)
    sizes = gram.diagonal().sqrt()
    correlations = gram / sizes / sizes[:, None]
    inverse = torch.linalg.pinv(correlations, rtol=cutoff, hermitian=True)
    assert torch.linalg.matrix_rank(inverse, hermitian=True) == seen
    solution = right / sizes @ inverse / sizes
    # Of all solutions the shortest.
    kept = torch.linalg.svd(correlations).U[:, :seen] * sizes[:, None]
    solution = solution @ kept @ torch.linalg.pinv(kept)
    torch.testing.assert_close(
        found.get_parameter(weight), start + 1.5 * solution, rtol=1e-6, atol=1e-9
    )
    bias = "layers.1.0.bias"
    start = suite.base.get_parameter(bias)
    steps = [expert.get_parameter(bias) - start for expert in suite.experts.values()]
    torch.testing.assert_close(found.get_parameter(bias), start + 1.5 * sum(steps) / len(steps))


def test_layers_outside_the_blocks_are_solved_where_it_is_asked_for() -> None:
    suite = clip_suite(sizes=(9, 5))
    without, found = (run(Lot, suite, outside=value) for value in (False, True))
    [patches] = [n for n, m in suite.base.named_modules() if isinstance(m, nn.Conv2d)]
    changed = {f"{patches}.weight"}
    right = gram = torch.zeros((), dtype=torch.float64)
    conv: Any = suite.base.get_submodule(patches)
    start = conv.weight.detach().flatten(1)
    for task, expert in suite.experts.items():
        pixels = torch.cat([batch["pixel_values"] for batch in suite.inputs[task]])
        size = conv.kernel_size[0]
        tiles = pixels.unfold(2, size, size).unfold(3, size, size)  # [n, c, rows, columns, ...]
        x = tiles.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)
        gram = gram + x.T @ x / len(x)
        step = expert.get_submodule(patches).weight.detach().flatten(1) - start  # type: ignore[union-attr]
        right = right + step @ x.T @ x / len(x)
    wanted = start + Lot().scale * right @ torch.linalg.pinv(gram, hermitian=True)
    torch.testing.assert_close(
        found.get_parameter(f"{patches}.weight").flatten(1), wanted, rtol=1e-5, atol=1e-7
    )
    norms = [
        name
        for name in dict(suite.base.named_modules())
        if "layrnorm" in name or "post_layernorm" in name
    ]
    for name in norms:
        layer: Any = suite.base.get_submodule(name)
        energy, right = 0.0, 0.0
        for task, expert in suite.experts.items():
            x = module_inputs(expert, suite.inputs[task], name)
            z = (x - x.mean(1, keepdim=True)) / (
                x.var(1, correction=0, keepdim=True) + layer.eps
            ).sqrt()
            own = z.square().mean(0)
            energy = energy + own
            right = right + own * (expert.get_parameter(f"{name}.weight") - layer.weight)
        wanted = layer.weight + Lot().scale * right / energy
        torch.testing.assert_close(found.get_parameter(f"{name}.weight"), wanted.detach())
        changed.add(f"{name}.weight")
    assert len(changed) == 3
    for name, value in found.state_dict().items():
        assert torch.equal(value, without.state_dict()[name]) == (name not in changed), name


def test_layers_outside_a_language_model_s_blocks_are_refused() -> None:
    with pytest.raises(CalibrationError, match=r"Set method\.outside=false"):
        run(Lot, t5_suite(), family="auto", outside=True)


@MERGERS
def test_fused_attention_merges_as_its_parts_would(merger: Any) -> None:
    plain, fused = two_arrangements()
    before = copy.deepcopy(fused.base.state_dict())
    assert_same_towers(run(merger, fused, family="auto"), run(merger, plain, family="auto"))
    assert all(torch.equal(value, before[n]) for n, value in fused.base.state_dict().items())


def test_anchor_of_fused_attention_is_that_of_its_parts() -> None:
    plain, fused = two_arrangements()
    found, wanted = (AnchorOnly().anchored(s.merged, s.base) for s in (fused, plain))
    assert_same_towers(found, wanted)


@MERGERS
def test_experts_that_agree_are_what_t5_merges_to(merger: Any) -> None:
    suite = t5_suite()
    suite.experts.update(dict.fromkeys(suite.experts, suite.experts["task_0"]))
    wanted = suite.experts["task_0"].state_dict()
    # float32 softmax and norms inside of T5; a direction that few rows reach stays as it is
    for name, value in run(merger, suite, family="auto").state_dict().items():
        if merger is not Lot:
            torch.testing.assert_close(value, wanted[name], rtol=1e-5, atol=1e-6)
        assert bool(torch.isfinite(value).all())


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_tied_embeddings_move_once(scale: float) -> None:
    suite = t5_suite()
    found = run(Lot, suite, family="auto", scale=scale).get_parameter("shared.weight")
    start, mean = (model.get_parameter("shared.weight") for model in (suite.base, mean_of(suite)))
    torch.testing.assert_close(found, start + scale * (mean - start))
