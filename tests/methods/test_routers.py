"""HARC: routers beside a dense solve, the positions that count, and what stays as it is."""

import copy
from typing import Any, NamedTuple

import pytest
import torch
from calibrations import assert_identical, gamma
from configs import composed
from hydra.utils import instantiate
from model_types import suite_named
from rivals import DRAW, applied
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, decoder_suite
from tiny_pools import AVERAGE, assert_equal, in_memory, inputs_of, refusing
from tiny_texts import text_pool
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.lab import rivals

TOLERANCE = 1e-12


def fitted(suite: Suite, **settings: Any) -> nn.Module:
    method = rivals.HARC(**({"samples_per_task": 99, "tolerance": TOLERANCE} | settings))
    return method.post_merge(copy.deepcopy(suite.merged), in_memory(suite)).model


def matrix(model: nn.Module, router: str) -> Tensor:
    """Weight and any bias of a router, side by side."""
    module = model.get_submodule(router)
    return torch.cat([p.detach().reshape(len(p), -1) for p in module.parameters()], 1)


class Solved(NamedTuple):
    """The shortest step of a router, and the largest error of one found iteratively."""

    step: Tensor
    bound: float


def solved_by_kronecker(suite: Suite, router: str) -> Solved:
    """Solve the system of a router by its pseudo-inverse, summed token by token."""
    merged = matrix(suite.merged, router)
    size = merged.numel()
    system, right = merged.new_zeros(size, size), merged.new_zeros(size)
    rows: list[Tensor] = []
    note = suite.merged.get_submodule(router).register_forward_pre_hook(
        lambda _, args: rows.append(args[0].detach().flatten(0, -2))
    )
    for task, batches in suite.inputs.items():
        expert, tokens = matrix(suite.experts[task], router), list[Tensor]()
        for batch in batches:
            with torch.no_grad():
                suite.merged(**batch)
            tokens += rows.pop()[batch["attention_mask"].flatten() > 0]
        for x in tokens:
            x = torch.cat([x, x.new_ones(merged.shape[1] - len(x))])
            p = (expert @ x).softmax(0)
            curvature = torch.kron(p.diag() - p.outer(p), x.outer(x)) / len(tokens)
            system += curvature
            right += curvature @ (expert - merged).flatten()
    note.remove()
    energies = torch.linalg.eigvalsh(system)
    cutoff = size * torch.finfo(system.dtype).eps
    least = energies[energies > cutoff * energies[-1]][0]
    step = torch.linalg.pinv(system, hermitian=True, rtol=cutoff) @ right
    bound = float((TOLERANCE + gamma(size**2, system.dtype)) * right.norm() / least)
    return Solved(step.view_as(merged), bound)


def assert_fits_equally(suite: Suite, reference: nn.Module) -> None:
    """Compare the routers of a Qwen3-MoE with those of an earlier fit, by the largest errors."""
    model = fitted(suite)
    for router in (f"{block}.mlp.gate" for block in suite.blocks):
        distance = (matrix(model, router) - matrix(reference, router)).norm()
        assert distance <= 2 * solved_by_kronecker(suite, router).bound


MIXTURES = {"qwen3_moe": "mlp.gate", "gpt_oss": "mlp.router"}  # the second has a bias


@pytest.mark.parametrize("name", ["qwen3_moe", pytest.param("gpt_oss", marks=NEEDS_RELEASE_5)])
def test_routers_take_the_shortest_step_that_solves_the_dense_system(name: str) -> None:
    """The step adds no vector to all rows of a router, which would change no probability."""
    suite = suite_named(name)
    model, routers = fitted(suite), [f"{block}.{MIXTURES[name]}" for block in suite.blocks]
    assert len(routers) == 2
    for router in routers:
        expected = solved_by_kronecker(suite, router)
        step = matrix(model, router) - matrix(suite.merged, router)
        assert expected.step.norm() > 1e6 * expected.bound
        assert (step - expected.step).norm() <= expected.bound
        assert step.sum(0).norm() <= 2 * expected.bound


def test_a_vector_on_all_rows_of_an_experts_router_has_no_part() -> None:
    suite = suite_named("qwen3_moe")
    reference = fitted(suite)
    for number, expert in enumerate(suite.experts.values()):
        for block in suite.blocks:
            expert.get_parameter(f"{block}.mlp.gate.weight").data += number - 0.3
    assert_fits_equally(suite, reference)


def test_padding_and_labels_have_no_part() -> None:
    suite = suite_named("qwen3_moe")
    reference, (batch, *_) = fitted(suite), suite.inputs["task_0"]
    batch["input_ids"][batch["attention_mask"] == 0] = 7
    batch["labels"] = torch.full_like(batch["input_ids"], -100)
    batch["labels"][:, 1] = 7
    assert_fits_equally(suite, reference)


def test_only_routers_change_and_equal_runs_are_equal() -> None:
    suite = suite_named("qwen3_moe")
    model, merged = fitted(suite), suite.merged.state_dict()
    changed = [n for n, value in model.state_dict().items() if not torch.equal(value, merged[n])]
    assert changed == [f"{block}.mlp.gate.weight" for block in suite.blocks]
    assert_identical(fitted(suite), model)


def test_steps_and_tolerance_end_the_fit() -> None:
    suite = suite_named("qwen3_moe")
    assert_identical(fitted(suite, tolerance=1.0), suite.merged)
    router = f"{suite.blocks[0]}.mlp.gate"
    solution = matrix(suite.merged, router) + solved_by_kronecker(suite, router).step
    models = suite.merged, *(fitted(suite, steps=number) for number in (1, 3, 9))
    far = [float((matrix(model, router) - solution).norm()) for model in models]
    assert far[0] > far[1] > far[2] > far[3] > 0


def test_its_algorithm_repairs_a_mergers_model(tmp_path) -> None:
    pool = text_pool("mixture", tmp_path)
    rivals.HARC().open(inputs_of(refusing(pool)))
    for name, path in pool._models.items():  # with options FusionBench loads models whole
        load = {"_target_": "transformers.AutoModelForCausalLM.from_pretrained"}
        load |= {"pretrained_model_name_or_path": path, "attn_implementation": "eager"}
        pool._models[name] = load
    result = rivals.HARCAlgorithm(base_method=AVERAGE, **DRAW).run(pool)
    merged = instantiate(AVERAGE).run(pool)
    assert_equal(result, applied("HARC", inputs_of(pool), merged, **DRAW)[1].model)


def test_a_repair_follows_it_and_it_follows_a_repair() -> None:
    both = "[featcal_plus,harc]"
    words = f"upstreams={both}", f"post_merging={both}", "references=[]"
    config = composed("method=compare", *(f"method.{word}" for word in words)).method
    cells = instantiate(config, _recursive_=False).cells
    titles = ["featcal_plus", "featcal_plus+harc", "harc", "harc+featcal_plus"]
    assert [cell.title for cell in cells] == titles


def test_models_without_routers_and_without_finite_features(tmp_path) -> None:
    none = r"harc fits routers of mixtures, but LlamaForCausalLM has none .*: leave it out"
    with pytest.raises(CalibrationError, match=none):  # before a model is loaded
        rivals.HARC().open(inputs_of(refusing(text_pool("causal", tmp_path))))
    with pytest.raises(CalibrationError, match=none):
        fitted(decoder_suite())
    suite = suite_named("qwen3_moe")
    suite.merged.get_parameter("model.layers.0.input_layernorm.weight").data[0] = torch.inf
    with pytest.raises(CalibrationError, match=r"gate\.weight is not finite .*Look for infinite"):
        fitted(suite)
