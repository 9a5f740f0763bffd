"""ProDistill beside a slow version of its own."""

import copy
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from tiny_models import clip_suite, residual_suite
from torch import nn
from torch.nn import functional

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import ChainFamily
from fusion_bench_featcal.lab.rivals import ProDistill
from fusion_bench_featcal.lab.rivals.training import shuffled_batches, task_generator


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, r"method\.epochs must be"),
        ({"learning_rate": -1}, r"method\.learning_rate must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        ProDistill(**settings)


def prodistill_by_hand(suite: Any, method: ProDistill) -> nn.Module:
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
        generator = task_generator(method.seed, block, "batches")
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


CHAIN = ChainFamily("chain", lambda _: [["layers.0", "layers.1", "layers.2"]])


# Replay runs whole models, in which an expert cannot receive the trained model's features.
@pytest.mark.parametrize("family", [{"name": "replay", "blocks": ["layers.*"]}, CHAIN])
def test_prodistill_trains_coefficients_block_by_block(family: Any) -> None:
    suite = residual_suite()
    method = ProDistill(epochs=3, batches_per_step=2, family=family)
    found = method.merge_models(suite.base, suite.experts, suite.inputs)
    known = prodistill_by_hand(suite, method)
    for name, value in known.named_parameters():
        torch.testing.assert_close(found.get_parameter(name), value, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_prodistill_comes_nearer_to_the_experts_than_its_start() -> None:
    suite = clip_suite()
    models = [
        method.merge_models(suite.base, suite.experts, suite.inputs)
        for method in (ProDistill(learning_rate=1e-12, epochs=1), ProDistill(epochs=60))
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
        ProDistill(learning_rate=1e300, epochs=5).merge_models(
            suite.base, suite.experts, suite.inputs
        )
