"""Routed experts are calibrated as loops over tokens say, in transformers' own fused form."""

import copy
from typing import Any

import torch
from tiny_languages import NEEDS_RELEASE_5
from torch import Tensor, nn
from torch.nn.functional import silu

from fusion_bench_featcal import Plus, calibrate

pytestmark = NEEDS_RELEASE_5
GAMMA, RIDGE, TOP, SLOTS = 3.0, 1e-2, 2, 5
TASKS = ("one", "two", "three")


def mixture(seed: int) -> Any:
    import transformers

    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "head_dim": 8, "num_key_value_heads": 2, "num_experts": SLOTS, "num_experts_per_tok": TOP,
        "norm_topk_prob": True, "moe_intermediate_size": 7, "initializer_range": 0.2,
    }  # fmt: skip
    model: Any = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    model.set_experts_implementation("eager")  # others have no float64
    return model.double().eval().requires_grad_(False)


def noisy(model: nn.Module, seed: int) -> Any:
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    for parameter in twin.parameters():
        parameter += 0.05 * torch.randn(parameter.shape, generator=generator).double()
    return twin


def entering(model: Any, batches: list) -> list[Tensor]:
    """The mixture's input at every counted token."""
    entered: list[Tensor] = []
    gate = model.model.layers[0].mlp
    hook = gate.register_forward_pre_hook(lambda _, args: entered.append(args[0].flatten(0, 1)))
    for batch in batches:
        model(**batch)
    hook.remove()
    masks = [batch["attention_mask"].flatten() > 0 for batch in batches]
    return [row for rows, mask in zip(entered, masks, strict=True) for row in rows[mask]]


def solved(tasks: list, ours: Tensor, base: Tensor) -> Tensor:
    """One matrix. A task is the expert's matrix, and its pairs of inputs in model and expert."""
    eye, zero = torch.eye(ours.shape[1]).double(), torch.zeros_like(ours)
    gram, cross, memory, answers = 0 * eye, zero, 0 * eye, zero
    energy = missing = output = 0.0
    for tuned, pairs in (task for task in tasks if task[1]):
        x, x_exp = (torch.stack(side) for side in zip(*pairs, strict=True))
        lacks = (x @ (tuned - ours).T).square().sum()
        w = (lacks / (x @ tuned.T).square().sum()) ** 0.25 / (x.T @ x).norm()
        tau = tuned - base
        rows = GAMMA * x.square().sum() * tau.T @ tau / tau.square().sum()
        gram, memory = gram + w * x.T @ x, memory + w * rows
        cross = cross + w * (x_exp @ tuned.T - x @ ours.T).T @ x
        answers = answers + w * (tuned - ours) @ rows
        energy, missing = energy + w * x.square().sum(), missing + w * lacks
        output = output + w * (x @ ours.T).square().sum()
    if not energy:
        return ours
    pull = 0.01 * memory.diagonal().mean() * eye
    alone = answers @ torch.linalg.inv(memory + pull)
    harm = ((alone @ gram * alone).sum() - 2 * (alone * cross).sum()).clamp_min(0)
    share = 1 / (1 + memory.trace() / energy * (harm / missing) * (harm / output) / 8)
    gram, cross = gram + share * memory, cross + share * answers
    return ours + cross @ torch.linalg.inv(gram + RIDGE * gram.diagonal().mean() * eye)


def inner(both: Tensor, x: Tensor) -> Tensor:
    gate, up = (both @ x).chunk(2)
    return silu(gate) * up


def test_routed_experts_equal_loops_over_tokens() -> None:
    base = mixture(0)
    experts = {task: noisy(base, number) for number, task in enumerate(TASKS, 1)}
    merged = copy.deepcopy(base)
    for name, parameter in merged.named_parameters():
        parameter.copy_(sum(expert.get_parameter(name) for expert in experts.values()) / len(TASKS))
    batches: dict[str, list] = {}
    for number, task in enumerate(TASKS):  # the last one has too few tokens for every slot
        ids = torch.randint(40, (12, 7), generator=torch.Generator().manual_seed(number))
        mask = torch.ones_like(ids)
        mask[:6, 5:] = 0
        ranges = [slice(0, 5), slice(5, 12)] if number < 2 else [slice(0, 1)]
        batches[task] = [{"input_ids": ids[p], "attention_mask": mask[p]} for p in ranges]
    rule = Plus(gamma=GAMMA, gammas=dict.fromkeys(TASKS, GAMMA), ridges=(RIDGE,))
    result = calibrate(merged, base, experts, batches, rule, progress=False, modules=["experts.*"])
    mlp, start = merged.model.layers[0].mlp, base.model.layers[0].mlp.experts
    tuned = {task: expert.model.layers[0].mlp.experts for task, expert in experts.items()}
    pairs = {task: [*zip(entering(merged, b), entering(experts[task], b), strict=True)]
             for task, b in batches.items()}  # fmt: skip
    new: Any = result.model.model.layers[0].mlp.experts  # type: ignore[operator]
    empty = 0
    for slot in range(SLOTS):
        sent = {
            task: [pair for pair in of_task
                   if slot in (mlp.gate.weight @ pair[0]).topk(TOP).indices.tolist()]
            for task, of_task in pairs.items()
        }  # fmt: skip
        empty += sum(not of_task for of_task in sent.values())
        entries = [(tuned[task].gate_up_proj[slot], sent[task]) for task in TASKS]
        entry = solved(entries, mlp.experts.gate_up_proj[slot], start.gate_up_proj[slot])
        exits = [
            (tuned[task].down_proj[slot],
             [(inner(entry, x), inner(tuned[task].gate_up_proj[slot], y)) for x, y in sent[task]])
            for task in TASKS
        ]  # fmt: skip
        exit = solved(exits, mlp.experts.down_proj[slot], start.down_proj[slot])
        torch.testing.assert_close(new.gate_up_proj[slot], entry, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(new.down_proj[slot], exit, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(entry, mlp.experts.gate_up_proj[slot], rtol=0.01)
    assert empty  # some slot has no row of a task
    records = result.log.of_kind("slots")
    assert [record["slots"] for record in records] == [SLOTS] * 4
