"""Slow reference of FeatCal+ in float64.

Whole models run forward for every group of modules. Rows stay in one table with their weights, and
the rows out of an expert's weights stand in it too, as far as they count.
"""

import copy
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from calibrations import counted_rows
from oracle import Features, record
from tiny_models import Suite, modules_of
from torch import Tensor, nn
from variations import size_of

HELD = 4  # one in four samples is held out
ENOUGH, FAMILIAR, LEAST = 64, 0.3, 1 / 4
GRID = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
UNKNOWN = 1e-2  # the ridge without samples to choose it by
SKETCHED = 16  # more outputs than this are compared through as many random sums of them
ALL_ROWS = ("k_proj", "v_proj")  # every token of the last block reaches others through them


@dataclass
class Seen:
    """One model's features for one task: inputs and outputs of modules."""

    received: Features
    returned: Features

    def inputs(self, name: str) -> Tensor:
        return flat(self.received[name])

    def outputs(self, names: Sequence[str]) -> Tensor:
        return torch.cat([flat(self.returned[name]) for name in names], dim=1)


class RowMasks:
    """Rows that count for a module, and all else that modules of one group have in common."""

    def __init__(self, suite: Suite, *, decoder_rows: str, biases: bool) -> None:
        self.suite, self.biases = suite, biases
        modules = modules_of(suite.merged, suite.blocks)
        is_auto = decoder_rows == "auto"
        in_all = "all" if is_auto else decoder_rows
        self.common, self.other = counted_rows(suite, modules, in_all)
        # With auto only targets count in the last block of a decoder.
        self.last = counted_rows(suite, modules, "targets")[0] if is_auto else None

    def masks(self, name: str) -> Any:
        """Masks of every task's batches, or None."""
        other = self.other or {}
        block = next(b for b in self.suite.blocks if name.startswith(f"{b}."))
        if self.last and block == self.suite.blocks[-1] and not name.endswith(ALL_ROWS):
            return self.last
        return other.get(name, other.get(block, self.common))

    def biased(self, name: str) -> bool:
        module: Any = self.suite.merged.get_submodule(name)
        return module.bias is not None and self.biases

    def closing(self, name: str) -> bool:
        """True if only the first token is read behind the module."""
        last = self.suite.blocks[-1]
        is_clip = type(self.suite.merged.get_submodule(last)).__name__ == "CLIPEncoderLayer"
        is_last = self.suite.family == "auto" and is_clip and name.startswith(f"{last}.")
        return is_last and not name.endswith(ALL_ROWS)

    def kind(self, name: str) -> tuple:
        return self.biased(name), self.closing(name), id(self.masks(name))

    def counting(self, name: str, task: str, calls: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Weight and sample of every row of a module's inputs."""
        batches, masks = self.suite.inputs[task], self.masks(name)
        weights, samples, before = [], [], 0
        for index, (batch, call) in enumerate(zip(batches, calls, strict=True)):
            weight = call.new_ones(call.shape[:-1])
            if masks is not None:
                weight = weight * masks[task][index].double().reshape(weight.shape)
            if self.closing(name):
                weight[:, 1:] = 0
            sample = before + torch.arange(len(call))
            before += size_of(batch)
            weights.append(weight.reshape(-1))
            samples.append(sample.repeat_interleave(weight[0].numel()))
        return torch.cat(weights), torch.cat(samples)


def calibrated_plus(
    suite: Suite,
    gamma: float = 4.0,
    *,
    decoder_rows: str = "all",
    biases: bool = True,
    factors: Mapping[str, float] | None = None,
    far: float = 0.25,
    ridges: Sequence[float] = GRID,
    seed: int = 42,
) -> dict[str, Tensor]:
    """New parameters by name of the suite's merged model."""
    model, base = (copy.deepcopy(m).double().eval() for m in (suite.merged, suite.base))
    experts = {task: copy.deepcopy(e).double().eval() for task, e in suite.experts.items()}
    masks = RowMasks(suite, decoder_rows=decoder_rows, biases=biases)
    batches = next(iter(suite.inputs.values()))
    new: dict[str, Tensor] = {}
    gammas: dict[str, float] = {}
    for block in suite.blocks:
        names = [n for n in modules_of(model, [block])[block] if is_linear(model, n)]
        expert_features = {
            task: listen(e, suite.inputs[task], block, names) for task, e in experts.items()
        }
        for group in groups_of(listen(model, batches, block, names), names, masks):
            first, biased = group[0], masks.biased(group[0])
            ours = {task: listen(model, suite.inputs[task], block, names) for task in experts}
            if not gammas:
                trust = trust_in(group, base, experts, ours, masks)
                for task in experts:
                    familiar = min(max(trust[task] / FAMILIAR, LEAST), 1)
                    lack = max(ENOUGH / sum(map(size_of, suite.inputs[task])), 1)
                    gammas[task] = gamma * lack / familiar**2
            samples, rows, lacking, energies = [], [], 0.0, 0.0
            weight, bias = parameters_of(model, group)
            for task, expert in experts.items():
                q, sample = masks.counting(first, task, ours[task].received[first])
                used = q > 0
                x = ours[task].inputs(first)[used]
                held_out = torch.isin(sample[used], held_out_samples(suite, task, seed))
                held_out &= len(ridges) > 1
                u = (expert_features[task].outputs(group) - ours[task].outputs(group))[used]
                their_weight, their_bias = parameters_of(expert, group)
                answer = x @ their_weight.T + their_bias
                mismatch = (answer - x @ weight.T - bias).square().sum()
                drift = max(mismatch / answer.square().sum(), torch.tensor(1e-8).to(x))
                w = (factors or {}).get(task, 1.0) * drift**far / (x.T @ x).norm()  # Eq. 14
                samples.append((x, u, w.expand(len(x)), held_out))
                energy = (x - x.mean(0) if biased else x).square().sum()
                tau = their_weight - parameters_of(base, group)[0]
                memory = tau * (gammas[task] * energy / tau.square().sum().clamp_min(1e-300)).sqrt()
                rows.append((memory, memory @ (their_weight - weight).T, w.expand(len(memory))))
                lacking, energies = lacking + w * mismatch, energies + w * energy
            samples, rows = ([torch.cat(c) for c in zip(*s, strict=True)] for s in (samples, rows))
            share = share_of_rows(samples, rows, weight, lacking, energies, biased)
            table = with_rows(samples, rows, share)
            solved = solved_group(group, model, table, biased, ridges)
            load(model, solved)
            new |= solved
    return new


def held_out_samples(suite: Suite, task: str, seed: int) -> Tensor:
    """Numbers of the samples that are held out."""
    count = sum(map(size_of, suite.inputs[task]))
    digest = hashlib.sha256(f"held out {seed} {task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(count, generator=generator)[: count // HELD]


def listen(model: nn.Module, batches: list, block: str, names: list[str]) -> Seen:
    return Seen(*record(model, batches, [block, *names], names))


def load(model: nn.Module, new: dict[str, Tensor]) -> None:
    for name, value in new.items():
        model.get_parameter(name).data.copy_(value)


def is_linear(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)).__name__ in ("Linear", "Conv1D")


def flat(calls: list[Tensor]) -> Tensor:
    return torch.cat([call.reshape(-1, call.shape[-1]) for call in calls])


def groups_of(heard: Seen, names: list[str], masks: RowMasks) -> list[list[str]]:
    """Modules of one kind that receive equal tensors, in the order of their first calls."""
    groups: list[list[str]] = []
    for name in (name for name in heard.received if name in names):
        for group in groups:
            pairs = zip(heard.received[name], heard.received[group[0]], strict=False)
            if masks.kind(name) == masks.kind(group[0]) and all(torch.equal(*p) for p in pairs):
                group.append(name)
                break
        else:
            groups.append([name])
    return groups


def parameters_of(model: nn.Module, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Concatenated weights `[m, d]` and biases of modules. A missing bias is zero."""
    weights, biases = [], []
    for name in names:
        module: Any = model.get_submodule(name)
        weight = module.weight.detach().clone()
        weights.append(weight.T if type(module).__name__ == "Conv1D" else weight)
        zero = weight.new_zeros(len(weights[-1]))
        biases.append(zero if module.bias is None else module.bias.detach().clone())
    return torch.cat(weights), torch.cat(biases)


def trust_in(group, base, experts, ours, masks) -> dict[str, float]:
    """Likeness of an expert's weights to its samples beyond that to other tasks'."""
    if len(experts) == 1:
        return dict.fromkeys(experts, FAMILIAR)
    start, grams, steps = parameters_of(base, group)[0], {}, {}
    for task, expert in experts.items():
        q, _ = masks.counting(group[0], task, ours[task].received[group[0]])
        x = ours[task].inputs(group[0])
        tau = parameters_of(expert, group)[0] - start
        grams[task], steps[task] = x.T @ (q[:, None] * x), tau.T @ tau

    def mean_cosine(a: Tensor, *matrices: Tensor) -> float:
        return sum(float((a * b).sum() / (a.norm() * b.norm())) for b in matrices) / len(matrices)

    trust = {}
    for task, step in steps.items():
        direct = mean_cosine(step, grams[task])
        excess = direct - mean_cosine(step, *grams.values())
        trust[task] = excess / (direct * (1 - mean_cosine(step, *steps.values())))
    return trust


def share_of_rows(samples, rows, weight, lacking, energies, biased: bool) -> float:
    """Share of the rows from weights that counts, by what their own step breaks on the samples."""
    (x, u, p, _), (memory, answers, of_rows) = samples, rows
    gram = memory.T @ (of_rows[:, None] * memory)
    if not (gram.trace() > 0 and lacking > 0):
        return 0.0
    cross = answers.T @ (of_rows[:, None] * memory)
    step = ridge_map(gram, cross, 1e-2)
    if biased:
        x, u = (side - p @ side / p.sum() for side in (x, u))
    combinations = sketch(len(weight)).T

    def energy(outputs: Tensor) -> float:
        return float(p @ (outputs @ combinations).square().sum(1))

    broken = max(energy(u - x @ step.T) - energy(u), 0.0)
    e, of_output = broken / float(lacking), broken / energy(x @ weight.T)
    gamma = float(gram.trace() / energies)
    return 1 / (1 + gamma * e * of_output / 8)


def with_rows(samples, rows, share: float):
    """Inputs, outputs, weights, shares of the mean, and flags. Rows from weights shift no mean.

    They stand in the table twice: for the fitted samples and for the held-out ones.
    """
    (x, u, p, held_out), (memory, answers, of_rows) = samples, rows
    none, part = torch.zeros_like(of_rows), p[held_out].sum() / p.sum()
    weights = share * (1 - part) * of_rows, share * part * of_rows
    flags = torch.zeros_like(none, dtype=torch.bool), torch.ones_like(none, dtype=torch.bool)
    return (
        torch.cat([x, memory, memory]), torch.cat([u, answers, answers]), torch.cat([p, *weights]),
        torch.cat([p, none, none]), torch.cat([held_out, *flags]),
    )  # fmt: skip


def moments(rows, chosen: Tensor, biased: bool):
    """Means, Gram and cross matrix of some rows."""
    x, u, p, share, _ = (column[chosen] for column in rows)
    total = share.sum()
    x_mean, u_mean = share @ x / total, share @ u / total
    gram, cross = (side.T @ (p[:, None] * x) / total for side in (x, u))
    if biased:
        gram, cross = gram - torch.outer(x_mean, x_mean), cross - torch.outer(u_mean, x_mean)
    return x_mean, u_mean, gram, cross


def ridge_map(gram: Tensor, cross: Tensor, ridge: float) -> Tensor:
    pull = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    return torch.linalg.solve(gram + pull, cross.T).T


def held_out_error(rows, ridge: float, biased: bool) -> tuple[float, float]:
    """Error on held-out rows, and the size of what it is the difference of."""
    held_out = rows[-1]
    x_mean, u_mean, gram, cross = moments(rows, ~held_out, biased)
    change = ridge_map(gram, cross, ridge)
    bias = u_mean - change @ x_mean if biased else torch.zeros_like(u_mean)
    x, u, p, share, _ = (column[held_out] for column in rows)
    combinations = sketch(len(u_mean)).T
    target, answer = u @ combinations, (x @ change.T + bias * (share > 0)[:, None]) @ combinations
    error = float(p @ (target - answer).square().sum(1))
    return error, float(p @ (target.abs() + answer.abs()).square().sum(1))


def sketch(m: int) -> Tensor:
    if m <= SKETCHED:
        return torch.eye(m, dtype=torch.float64)
    signs = torch.randint(2, (m, SKETCHED), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return signs.T.double() / 4


def solved_group(
    group: list[str], model: nn.Module, rows, biased: bool, ridges: Sequence[float]
) -> dict[str, Tensor]:
    ridge = ridges[0]
    if len(ridges) > 1:
        ridge = UNKNOWN
        if (rows[3][rows[-1]] > 0).any():
            errors = {ridge: held_out_error(rows, ridge, biased) for ridge in ridges}
            least = min(errors.values())
            equal = (r for r, (e, size) in errors.items() if e <= least[0] + 1e-14 * size)
            ridge = max(equal)  # of ridges with equal errors up to rounding
    x_mean, u_mean, gram, cross = moments(rows, rows[2] >= 0, biased)
    change = ridge_map(gram, cross, ridge)
    sizes = [len(parameters_of(model, [name])[1]) for name in group]
    weight, bias = parameters_of(model, group)
    weights, biases = (weight + change).split(sizes), (bias + u_mean - change @ x_mean).split(sizes)
    new = {}
    for name, part, shift in zip(group, weights, biases, strict=True):
        is_turned = type(model.get_submodule(name)).__name__ == "Conv1D"
        new[f"{name}.weight"] = part.T if is_turned else part
        if biased:
            new[f"{name}.bias"] = shift
    return new
