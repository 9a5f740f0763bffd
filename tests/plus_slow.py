"""A second opinion on FeatCal+ with rows out of weights: slow, plain, in float64.

Whole models run forward for every group of modules. Rows stay in one table. The rows out of an
expert's weights are explicit too: eigenvectors of their second moment, each with both signs.
"""

import copy
import math
from types import SimpleNamespace

import torch
from plus_oracle import downhill, listen, load, sketch
from plus_rows import FOLDS, RowMasks, groups_of, is_linear, parameters_of
from tiny_models import Suite, modules_of
from torch import Tensor, nn

ENOUGH, FAMILIAR, LEAST = 64, 0.3, 1 / 4
GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
START = 2


def calibrated_plus(suite: Suite, gamma: float) -> dict[str, Tensor]:
    """New parameters by name of the suite's merged model."""
    model = copy.deepcopy(suite.merged).double().eval()
    base = copy.deepcopy(suite.base).double()
    experts = {task: copy.deepcopy(e).double().eval() for task, e in suite.experts.items()}
    masks = RowMasks(suite, SimpleNamespace(decoder_rows="all", calibrate_bias=True))
    batch = next(iter(suite.inputs.values()))[0]
    new: dict[str, Tensor] = {}
    gammas: dict[str, float] = {}
    for block in suite.blocks:
        names = [name for name in modules_of(model, [block])[block] if is_linear(model, name)]
        groups = groups_of(model, batch, names, lambda name: masks.kind(name, ()))
        theirs = {task: listen(e, suite.inputs[task], block, names) for task, e in experts.items()}
        for group in groups:
            ours = {task: listen(model, suite.inputs[task], block, names) for task in experts}
            if not gammas:
                trust = trust_in(group, base, experts, ours, masks)
                for task, batches in suite.inputs.items():
                    samples = sum(samples_of(batch) for batch in batches)
                    familiar = min(max(trust[task] / FAMILIAR, LEAST), 1)
                    gammas[task] = gamma * max(ENOUGH / samples, 1) / familiar**2
            tables = [
                task_table(
                    group,
                    model,
                    base,
                    experts[task],
                    ours[task],
                    theirs[task],
                    masks,
                    task,
                    gammas[task],
                )
                for task in experts
            ]
            solved = solved_group(group, model, tables, masks.biased(group[0]))
            load(model, solved)
            new |= solved
    return new


def task_table(group, model, base, expert, ours, theirs, masks, task, gamma) -> tuple[Tensor, ...]:
    """Rows `x`, targets `u`, weights and folds of samples; then the rows out of weights."""
    q, sample = masks.counting(group[0], task, ours.received[group[0]])
    used = q > 0
    q, sample, x = q[used], sample[used], ours.inputs(group[0])[used]
    u = theirs.outputs(group)[used] - ours.outputs(group)[used]
    (weight, _), (expert_weight, _) = parameters_of(model, group), parameters_of(expert, group)
    p = q / q.sum()
    p = p / (x.T @ (p[:, None] * x)).norm()  # Eq. 14
    centre = x - (p @ x) / p.sum() if masks.biased(group[0]) else x
    energy = float(p @ centre.square().sum(1)) / float(p.sum())
    tau = expert_weight - parameters_of(base, group)[0]
    moment = gamma * energy * tau.T @ tau / tau.square().sum().clamp_min(1e-300)
    values, vectors = torch.linalg.eigh(moment)
    memory = (vectors * values.clamp_min(0).sqrt()).T
    return x, u, p, sample % FOLDS, memory, memory @ (expert_weight - weight).T


def samples_of(batch) -> int:
    return len(next(iter(batch.values())) if isinstance(batch, dict) else batch)


def trust_in(group, base, experts, ours, masks) -> dict[str, float]:
    """How much more an expert's weights look like its own samples than like other tasks'."""
    start, _ = parameters_of(base, group)
    seen, steps = {}, {}
    for task, expert in experts.items():
        q, _ = masks.counting(group[0], task, ours[task].received[group[0]])
        x = ours[task].inputs(group[0])
        tau = parameters_of(expert, group)[0] - start
        seen[task], steps[task] = x.T @ (q[:, None] * x), tau.T @ tau

    def cosine(a: Tensor, b: Tensor) -> float:
        return float((a * b).sum() / (a.norm() * b.norm()))

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    trust = {}
    for task, step in steps.items():
        own = cosine(step, seen[task])
        others = mean(cosine(step, x) for x in seen.values())
        alike = mean(cosine(step, other) for other in steps.values())
        trust[task] = (own - others) / (own * (1 - alike))
    return trust


def moments(tables, folds, biased: bool):
    """Means, Gram and cross matrix of some folds, with their shares of the rows out of weights."""
    d, m = tables[0][0].shape[1], tables[0][1].shape[1]
    total, x_sum, u_sum = 0.0, torch.zeros(d).double(), torch.zeros(m).double()
    gram, cross = torch.zeros(d, d).double(), torch.zeros(m, d).double()
    for x, u, p, fold, memory, answer in tables:
        chosen = torch.isin(fold, torch.tensor(folds))
        part = p[chosen]
        total += float(part.sum())
        x_sum, u_sum = x_sum + part @ x[chosen], u_sum + part @ u[chosen]
        gram += x[chosen].T @ (part[:, None] * x[chosen]) + part.sum() * memory.T @ memory
        cross += u[chosen].T @ (part[:, None] * x[chosen]) + part.sum() * answer.T @ memory
    x_mean, u_mean, gram, cross = x_sum / total, u_sum / total, gram / total, cross / total
    if biased:
        gram, cross = gram - torch.outer(x_mean, x_mean), cross - torch.outer(u_mean, x_mean)
    return x_mean, u_mean, gram, cross


def ridge_map(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    if math.isinf(ridge):
        return torch.zeros_like(cross)
    pull = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + pull, cross.T).T


def held_out_error(tables, fold: int, ridge: float, biased: bool) -> float:
    others = [k for k in range(FOLDS) if k != fold]
    x_mean, u_mean, gram, cross = moments(tables, others, biased)
    change = ridge_map(gram, cross, ridge)
    bias = u_mean - change @ x_mean if biased else torch.zeros_like(u_mean)
    error, probes = 0.0, sketch(len(u_mean))
    for x, u, p, folds, memory, answer in tables:
        held = folds == fold
        rows = (u[held] - x[held] @ change.T - bias) @ probes.T
        error += float(p[held] @ rows.square().sum(1))
        error += float(p[held].sum() * ((answer - memory @ change.T) @ probes.T).square().sum())
    return error


def solved_group(group: list[str], model: nn.Module, tables, biased: bool) -> dict[str, Tensor]:
    used = sorted({int(k) for table in tables for k in table[3].unique()})
    ridge = 1.0
    if len(used) > 1:
        ends = (*GRID, math.inf)
        errors = [sum(held_out_error(tables, k, ridge, biased) for k in used) for ridge in ends]
        ridge = ends[downhill(errors, START)]
    x_mean, u_mean, gram, cross = moments(tables, list(range(FOLDS)), biased)
    change = ridge_map(gram, cross, ridge)
    weight, bias = parameters_of(model, group)
    weight, bias = weight + change, bias + u_mean - change @ x_mean
    new, start = {}, 0
    for name in group:
        module = model.get_submodule(name)
        m = len(parameters_of(model, [name])[1])
        part = weight[start : start + m]
        new[f"{name}.weight"] = part.T if type(module).__name__ == "Conv1D" else part
        if biased:
            new[f"{name}.bias"] = bias[start : start + m]
        start += m
    return new
