"""Methods of the field beside slow versions of their own: SVC, LARV, MAGIC and ProDistill."""

import copy
import math
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import numpy as np
import pytest
import torch
from fusion_bench.method.singular_value_calibration.svc import SingularValueCalibration
from text_pools import text_pool
from tiny_models import clip_suite, residual_suite
from tiny_pools import TASKS, inputs_of, tiny_pool
from torch import nn
from torch.nn import functional
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.methods import Larv, Magic, ProDistill, SingularValues
from fusion_bench_featcal.methods.blockwise import merge_blockwise
from fusion_bench_featcal.methods.data_free import effective_rank
from fusion_bench_featcal.methods.prodistill import ProDistilling
from fusion_bench_featcal.methods.training import shuffled_batches, task_generator


def tower(models: Any, name: str) -> Any:
    return CLIPVisionModel.from_pretrained(models[name]).eval()


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_svc_is_fusion_bench_s_over_any_merged_model(models, alpha) -> None:
    known = SingularValueCalibration(alpha=alpha).run(tiny_pool(models))
    found = SingularValues(alpha=alpha).post_merge(
        tower(models, "_merged_"), inputs_of(tiny_pool(models))
    )
    merged = tower(models, "_merged_").state_dict()
    for name, value in known.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=1e-5, atol=1e-6)
        if value.ndim != 2:
            assert torch.equal(value, merged[name])
    changed = [
        name for name, value in known.state_dict().items() if not torch.equal(value, merged[name])
    ]
    assert len(changed) > 10


def larv_by_hand(merged: Any, base: Any, strength: float, gain: float, rise: float) -> dict:
    """Written out in NumPy, matrix by matrix."""
    layers = (
        merged.vision_model.encoder.layers
        if hasattr(merged, "vision_model")
        else merged.encoder.layers
    )
    facts = []
    for number in range(len(layers)):
        mark = f"encoder.layers.{number}."
        rich, conflict = [], []
        for name, value in merged.named_parameters():
            if mark not in name or value.ndim != 2:
                continue
            a = base.get_parameter(name).detach().double().numpy()
            d = value.detach().double().numpy() - a
            ranks = []
            for m in (a, d):
                p = np.linalg.svd(m, compute_uv=False) ** 2
                p = p[p > 0] / p.sum()
                ranks.append(math.exp(-(p * np.log(p)).sum()))
            rich.append(ranks[0] / ranks[1])
            apart = np.linalg.norm(a @ d.T - d @ a.T) + np.linalg.norm(a.T @ d - d.T @ a)
            conflict.append(apart / 2 / np.linalg.norm(a) / np.linalg.norm(d))
        facts.append((np.mean(rich), np.mean(conflict)))
    conflicts = np.array([c for _, c in facts])
    z = (conflicts - conflicts.mean()) / conflicts.std()
    scores = np.array(
        [
            e * ((i + 1) / len(facts)) ** rise / (1 + np.log(1 + np.exp(z[i])))
            for i, (e, _) in enumerate(facts)
        ]
    )
    gates = 1 + strength * np.tanh(gain * (scores / scores.mean() - 1))
    return {f"encoder.layers.{i}.": gate for i, gate in enumerate(gates)}


def test_larv_scales_the_steps_of_blocks_by_its_gates(models) -> None:
    pool = tiny_pool(models)
    merged, base = tower(models, "_merged_"), tower(models, "_pretrained_")
    settings = {"strength": 0.4, "gain": 2.0, "rise": 1.0}
    found = Larv(**settings).post_merge(copy.deepcopy(merged), inputs_of(pool))
    gates = larv_by_hand(merged, base, **settings)
    assert len({round(float(gate), 6) for gate in gates.values()}) == len(gates) > 1
    for name, value in merged.named_parameters():
        gate = next((gate for mark, gate in gates.items() if mark in name), 1.0)
        start = base.get_parameter(name)
        wanted = start + gate * (value - start)
        torch.testing.assert_close(found.get_parameter(name), wanted, rtol=1e-4, atol=1e-6)


def test_larv_leaves_blocks_that_no_expert_changed(models) -> None:
    merged, base = tower(models, "_merged_"), tower(models, "_pretrained_")
    for name, value in merged.named_parameters():
        if "layers.0" in name:
            value.data.copy_(base.get_parameter(name))
    found = Larv().post_merge(copy.deepcopy(merged), inputs_of(tiny_pool(models)))
    for name, value in merged.named_parameters():
        if "layers.0" in name:
            assert torch.equal(found.get_parameter(name), value)
    same = Larv().post_merge(copy.deepcopy(base), inputs_of(tiny_pool(models)))
    assert all(torch.equal(v, base.state_dict()[n]) for n, v in same.state_dict().items())


def test_effective_rank_counts_equal_directions() -> None:
    assert effective_rank(torch.eye(5).double()) == pytest.approx(5)
    assert effective_rank(torch.ones(4, 4).double()) == pytest.approx(1)


def outputs_of(model: nn.Module, pixels: torch.Tensor, name: str) -> tuple[Any, Any]:
    """What one module receives and gives."""
    seen: list[Any] = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda _, args, out: seen.append((args[0], out))
    )
    model(pixels)
    handle.remove()
    return seen[0]


@torch.no_grad()
def test_magic_brings_a_module_s_step_to_the_experts_magnitude(models) -> None:
    pool = tiny_pool(models)
    method = Magic(samples_per_task=6, batch_size=6)
    found = method.post_merge(tower(models, "_merged_"), inputs_of(pool))
    merged, base = tower(models, "_merged_"), tower(models, "_pretrained_")
    draws = inputs_of(pool).batches(FeatCalSettings(samples_per_task=6, batch_size=6))
    names = [n for n, m in merged.named_modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
    changes: list[float] = []
    for name in names:
        factors = []
        for task in TASKS:
            [batch] = draws[task]
            x, y = outputs_of(merged, batch["pixel_values"], name)
            start, wanted = (m.get_submodule(name)(x) for m in (base, tower(models, task)))
            rows = (wanted - start).abs().sum(-1) / (y - start).abs().sum(-1)
            factors.append(float(rows.mean()))
        factor = sum(factors) / len(factors)
        changes.append(abs(factor - 1))
        for leaf in ("weight", "bias"):
            begin = base.get_parameter(f"{name}.{leaf}")
            step = merged.get_parameter(f"{name}.{leaf}") - begin
            torch.testing.assert_close(
                found.get_parameter(f"{name}.{leaf}"), begin + factor * step, rtol=1e-3, atol=1e-5
            )
    assert max(changes) > 0.01
    assert method.samples(found, TASKS)["one"] == {"samples": 6, "split": "train"}
    position = next(n for n, _ in merged.named_parameters() if "position_embedding" in n)
    assert torch.equal(found.get_parameter(position), merged.get_parameter(position))


@pytest.mark.parametrize("kind", ["seq2seq", "causal"])
def test_magic_and_data_free_methods_run_on_language_models(kind, tmp_path) -> None:
    pool = text_pool(kind, tmp_path)
    merged = copy.deepcopy(pool.load_model("one"))
    for method in (Magic(samples_per_task=4), Larv(), SingularValues()):
        method.check(inputs_of(pool))
        found = method.post_merge(copy.deepcopy(merged), inputs_of(pool))
        assert all(bool(torch.isfinite(value).all()) for value in found.state_dict().values())
        assert method.added(found) == {}


@pytest.mark.parametrize("kind", [Magic, Larv, SingularValues])
def test_without_a_base_they_are_refused(models, kind) -> None:
    pool = tiny_pool(
        {name: models[name] for name in (*TASKS, "_merged_")} | {"_pretrained_": models["one"]}
    )
    pool._models.pop("_pretrained_")
    with pytest.raises(CalibrationError, match="_pretrained_"):
        kind().check(inputs_of(pool))


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (SingularValues, {"alpha": 0}, r"method\.alpha must be a finite number > 0"),
        (Larv, {"strength": 2}, r"method\.strength must be a number in \[0, 1\]"),
        (Larv, {"strenght": 0.1}, "'strength'"),
        (Magic, {"samples_per_task": 0}, r"method\.samples_per_task"),
        (ProDistill, {"epochs": 0}, r"method\.epochs must be"),
        (ProDistill, {"learning_rate": -1}, r"method\.learning_rate must be"),
    ],
)
def test_settings_out_of_range_are_refused(kind, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def prodistill_by_hand(suite: Any, method: ProDistilling, settings: FeatCalSettings) -> nn.Module:
    """Block by block, with Adam written out and models run whole."""
    tasks = list(suite.experts)
    start = dict(copy.deepcopy(suite.base).named_parameters())
    vectors = {
        name: [
            dict(suite.experts[t].named_parameters())[name].detach() - value.detach() for t in tasks
        ]
        for name, value in start.items()
    }
    model = copy.deepcopy(suite.base)
    for name, value in model.named_parameters():
        value.data += method.coefficient * sum(vectors[name])

    def block_io(net: nn.Module, batch: Any, block: str) -> tuple[Any, Any]:
        seen: list[Any] = []
        hook = net.get_submodule(block).register_forward_hook(
            lambda _, args, out: seen.append((args[0], out))
        )
        with torch.no_grad():
            net(batch)
        hook.remove()
        return seen[0]

    for block in ("layers.0", "layers.1", "layers.2"):
        lessons = [
            (block_io(model, batch, block)[0], block_io(suite.experts[task], batch, block)[1])
            for task in tasks
            for batch in suite.inputs[task]
        ]
        names = [name for name in start if name.startswith(f"{block}.")]
        weights = {
            n: torch.full((len(tasks), *start[n].shape), method.coefficient).to(start[n])
            for n in names
        }
        first = {n: torch.zeros_like(w) for n, w in weights.items()}
        second = {n: torch.zeros_like(w) for n, w in weights.items()}
        steps = method.epochs * -(-len(lessons) // method.batches_per_step)
        generator = task_generator(settings.seed, block, "batches")
        drawn = shuffled_batches(len(lessons), method.batches_per_step, steps, generator)
        for count, positions in enumerate(drawn, start=1):
            leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
            for n in names:
                stacked = torch.stack(vectors[n])
                module, _, leaf = n.rpartition(".")
                owner = model.get_submodule(module)
                if leaf in owner._parameters:
                    del owner._parameters[leaf]
                setattr(owner, leaf, start[n].detach() + (leaves[n] * stacked).sum(0))
            far = [model.get_submodule(block)(lessons[i][0]) - lessons[i][1] for i in positions]
            loss = torch.cat(far).square().sum()
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            for n, g in zip(names, gradients, strict=True):
                first[n] = 0.9 * first[n] + 0.1 * g
                second[n] = 0.999 * second[n] + 0.001 * g**2
                size = (second[n] / (1 - 0.999**count)).sqrt() + 1e-8
                weights[n] = weights[n] - method.learning_rate * first[n] / (1 - 0.9**count) / size
        for n in names:
            module, _, leaf = n.rpartition(".")
            owner = model.get_submodule(module)
            delattr(owner, leaf)
            value = start[n].detach() + (weights[n] * torch.stack(vectors[n])).sum(0)
            owner.register_parameter(leaf, nn.Parameter(value))
    return model


def test_prodistill_trains_coefficients_block_by_block() -> None:
    suite = residual_suite()
    method = ProDistilling(epochs=3, batches_per_step=2)
    settings = FeatCalSettings(
        family={"name": "replay", "blocks": ["layers.*"]}, calibrate_norm=False
    )
    found = merge_blockwise(
        suite.base, suite.experts, suite.inputs, settings, method, progress=False
    )
    known = prodistill_by_hand(suite, method, settings)
    for name, value in known.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_prodistill_comes_nearer_to_the_experts_than_its_start() -> None:
    suite = clip_suite()
    settings = FeatCalSettings()
    models = [
        merge_blockwise(suite.base, suite.experts, suite.inputs, settings, method, progress=False)
        for method in (ProDistilling(learning_rate=1e-12, epochs=1), ProDistilling(epochs=60))
    ]
    far = [
        sum(
            float(functional.mse_loss(m(**batch).pooler_output, expert(**batch).pooler_output))
            for task, expert in suite.experts.items()
            for batch in suite.inputs[task]
        )
        for m in models
    ]
    assert far[1] < 0.8 * far[0]


def test_prodistill_that_diverges_names_block_and_setting() -> None:
    suite = clip_suite()
    with pytest.raises(CalibrationError, match=r"layers\.0.*method\.learning_rate"):
        merge_blockwise(
            suite.base, suite.experts, suite.inputs, FeatCalSettings(),
            ProDistilling(learning_rate=1e300, epochs=5), progress=False,
        )  # fmt: skip
