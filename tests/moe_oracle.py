"""Mixtures of experts, calibrated slowly in float64; nothing of the package is imported.

Whole forward passes of the models are recorded at every block. Which tokens reach an expert is
found by hand, from the router's weight and what the calibrated model sends into the mixture; what
the expert's own modules receive there is computed by hand, for both sides. Experts are read and
written where either release of transformers stores them.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import Batch, Knobs, Masks, Models, Rows, anchors, gather, record, solve, solve_linear
from torch import Tensor, nn
from torch.nn.functional import silu

FEWEST = 32  # tokens of a task, below which it has no say in an expert
PARTS = ("gate", "up", "down")
NAMES: dict[str, str] = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass
class MixtureOutcome:
    """The calibrated model; tokens by mixture, expert and task; how many go elsewhere in experts.

    `elsewhere` counts tokens that the task's own expert sends to other experts.
    """

    model: nn.Module
    tokens: dict[tuple[str, int, str], int] = field(default_factory=dict)
    elsewhere: int = 0


def calibrate_mixture_slowly(
    merged: nn.Module,
    base: nn.Module,
    experts: Models,
    inputs: Mapping[str, Sequence[Batch]],
    blocks: Sequence[str],
    dense: Mapping[str, Sequence[str]],
    knobs: Knobs,
    masks: Mapping[str, Masks],
) -> MixtureOutcome:
    """Calibrate a float64 copy of `merged`, block by block; `dense` has a block's other modules."""
    outcome = MixtureOutcome(copy.deepcopy(merged).double().eval())
    doubled = {task: copy.deepcopy(expert).double().eval() for task, expert in experts.items()}
    start = (merged, base)
    for block in blocks:
        mixture = find_mixture(merged, block)
        names = [*dense[block], *([mixture] if mixture else [])]
        seen, theirs = (
            {t: record(model(t), inputs[t], names, blocks)[0] for t in doubled}
            for model in (lambda _: outcome.model, doubled.__getitem__)
        )
        new: dict[str, Tensor] = {}
        anchor = anchors(merged, base, knobs)
        for name in dense[block]:
            rows = {t: gather(seen[t][name], theirs[t][name], masks[t], False) for t in doubled}
            new |= solve(name, outcome.model, doubled, anchor, rows, knobs)
        found: dict[tuple[int, str], Tensor] = {}
        if mixture:
            rows = {
                t: gather(seen[t][mixture], theirs[t][mixture], masks[t], False) for t in doubled
            }
            found = solve_experts(mixture, outcome, doubled, start, rows, knobs)
        with torch.no_grad():
            for name, value in new.items():
                outcome.model.get_parameter(name).copy_(value)
            for (number, part), value in found.items():
                matrix(outcome.model, mixture, number, part).copy_(value)
    return outcome


def find_mixture(model: nn.Module, block: str) -> str:
    """Name of the module in a block that has a router and experts; empty if there is none."""
    inside = model.get_submodule(block).named_modules(prefix=block)
    return next((name for name, m in inside if hasattr(m, "gate") and hasattr(m, "experts")), "")


def matrix(model: nn.Module, mixture: str, number: int, part: str) -> Tensor:
    """One expert's matrix, `[out, in]`, where the model stores it."""
    experts: Any = model.get_submodule(mixture).experts
    if hasattr(experts, "gate_up_proj"):
        both = experts.gate_up_proj.data[number].chunk(2)
        return experts.down_proj.data[number] if part == "down" else both[part == "up"]
    expert = experts[number]
    name = NAMES[part] if hasattr(expert, NAMES[part]) else f"{part}_proj"
    return getattr(expert, name).weight.data


def chosen(model: Any, mixture: str, hidden: Tensor) -> Tensor:
    """1 where a token `[n, d]` is sent to an expert, `[n, experts]`."""
    logits = hidden @ model.get_submodule(mixture).gate.weight.detach().T
    hit = torch.zeros_like(logits)
    return hit.scatter_(1, logits.argsort(dim=1)[:, -model.config.num_experts_per_tok :], 1)


def solve_experts(
    mixture: str,
    outcome: MixtureOutcome,
    experts: Models,
    start: tuple[nn.Module, nn.Module],
    rows: Mapping[str, Rows],
    knobs: Knobs,
) -> dict[tuple[int, str], Tensor]:
    """New matrices by expert and part."""
    model: Any = outcome.model
    hit = {task: chosen(model, mixture, r.cal) for task, r in rows.items()}
    for task, r in rows.items():
        own = chosen(experts[task], mixture, r.exp)
        outcome.elsewhere += int((own != hit[task]).any(dim=1).sum())
    new: dict[tuple[int, str], Tensor] = {}
    for number in range(len(model.get_submodule(mixture).gate.weight)):
        shares = {task: hit[task][:, number] * r.p > 0 for task, r in rows.items()}
        for task, share in shares.items():
            outcome.tokens[mixture, number, task] = int(share.sum())
        counted = [task for task, share in shares.items() if share.sum() >= FEWEST]
        if not counted:
            continue
        taken = {
            t: Rows(rows[t].cal[shares[t]], rows[t].exp[shares[t]], torch.empty(0)) for t in counted
        }
        for part in PARTS:
            part_rows: dict[str, Rows] = {}
            for task, r in taken.items():
                cal, exp = r.cal, r.exp
                if part == "down":
                    cal = activated(model, mixture, number, cal)
                    exp = activated(experts[task], mixture, number, exp)
                part_rows[task] = Rows(cal, exp, cal.new_full((len(cal),), 1 / len(cal)))
            weights = {t: matrix(experts[t], mixture, number, part) for t in counted}
            own, base = (matrix(m, mixture, number, part).double() for m in start)
            anchor = knobs.rho * own + (1 - knobs.rho) * base
            new[number, part], _ = solve_linear(part_rows, weights, None, (anchor, None), knobs)
    return new


def activated(model: nn.Module, mixture: str, number: int, hidden: Tensor) -> Tensor:
    """Input of an expert's last matrix."""
    gate, up = (matrix(model, mixture, number, part) for part in ("gate", "up"))
    return silu(hidden @ gate.T) * (hidden @ up.T)
