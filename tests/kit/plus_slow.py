"""Slow reference of FeatCal+ in float64: whole models run forward for every group of modules."""

import copy
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from calibrations import before_targets, counted_rows
from oracle import Features, record
from plus_solve_slow import GRID, Numbers, Table, solved_group
from slots_slow import entry_and_exit, inner, mapped, matrix_of, mixtures_in, sent_to, store
from tiny_models import Suite, modules_of, normal
from torch import Tensor, nn
from variations import size_of

HELD = 4  # one in four samples is held out
ENOUGH, FAMILIAR, LEAST, UNLIKE = 64, 0.3, 1 / 4, 0.1
ALL_ROWS = ("k_proj", "v_proj")  # every token reaches others through them


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

    def __init__(
        self, suite: Suite, modules: Mapping[str, list[str]], *, decoder_rows: str, biases: bool
    ) -> None:
        self.suite, self.modules, self.biases = suite, modules, biases
        is_auto = decoder_rows == "auto"
        in_all = "all" if is_auto else decoder_rows
        self.common, self.other = counted_rows(suite, modules, in_all)
        # With auto only targets count in the last block of a decoder.
        self.last = counted_rows(suite, modules, "targets")[0] if is_auto else None
        # Before it they weigh as much as all others of the task, if they are fewer.
        self.heavy = heavy_targets(suite, self.common) if is_auto and not self.other else None

    def masks(self, name: str) -> Any:
        """Masks of every task's batches, or None."""
        other = self.other or {}
        block = next(b for b in self.suite.blocks if f"{name}.".startswith(f"{b}."))
        if self.last and block == self.suite.blocks[-1] and not name.endswith(ALL_ROWS):
            return self.last
        if self.heavy and block != self.suite.blocks[-1] and not name.endswith(ALL_ROWS):
            return self.heavy
        return other.get(name, other.get(block, self.common))

    def biased(self, name: str) -> bool:
        module: Any = self.suite.merged.get_submodule(name)
        has_bias = getattr(module, "bias", None) is not None or getattr(module, "has_bias", False)
        return has_bias and self.biases

    def closing(self, name: str) -> bool:
        """True if only the first token is read behind the module."""
        last = self.suite.blocks[-1]
        is_clip = type(self.suite.merged.get_submodule(last)).__name__ == "CLIPEncoderLayer"
        is_last = self.suite.family == "auto" and is_clip and name.startswith(f"{last}.")
        return is_last and not name.endswith(ALL_ROWS)

    def runs(self, name: str, batch: Any) -> bool:
        """False for texts alone in front of a tower for images."""
        first = next(iter(self.suite.inputs.values()))[0]
        is_mixed = isinstance(first, Mapping) and {"pixel_values", "input_ids"} <= {*first}
        return not is_mixed or "language_model" in name or "pixel_values" in batch

    def all_run(self, name: str) -> bool:
        return all(self.runs(name, b) for batches in self.suite.inputs.values() for b in batches)

    def kind(self, name: str) -> tuple:
        return self.biased(name), self.closing(name), id(self.masks(name))

    def counting(self, name: str, task: str, calls: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Weight and sample of every row of a module's inputs."""
        batches, masks = self.suite.inputs[task], self.masks(name)
        weights, samples, before, heard = [], [], 0, iter(calls)
        for index, batch in enumerate(batches):
            if not self.runs(name, batch):
                before += size_of(batch)
                continue
            call = next(heard)
            weight = call.new_ones(call.shape[:-1])
            if masks is not None and masks[task] is not None:
                weight = weight * masks[task][index].double().reshape(weight.shape)
            if self.closing(name):
                weight[:, 1:] = 0
            sample = before + torch.arange(size_of(batch))
            before += size_of(batch)
            weights.append(weight.reshape(-1))
            samples.append(sample.repeat_interleave(weight.numel() // len(sample)))
        return torch.cat(weights), torch.cat(samples)


def calibrated_plus(
    suite: Suite,
    gamma: float = 4.0,
    *,
    decoder_rows: str = "all",
    biases: bool = True,
    modules: Mapping[str, list[str]] | None = None,
    factors: Mapping[str, float] | None = None,
    far: float = 0.25,
    ridges: Sequence[float] = GRID,
    seed: int = 42,
) -> dict[str, Tensor]:
    """New parameters by name of the suite's merged model. `modules` are those of each block."""
    modules = modules or modules_of(suite.merged, suite.blocks)
    masks = RowMasks(suite, modules, decoder_rows=decoder_rows, biases=biases)
    run = Run(suite, masks, Numbers(gamma, factors or {}, far, ridges, {}, {}), seed)
    for block in suite.blocks:
        run.calibrate(block)
    return {name: run.model.get_parameter(name).detach() for name in run.changed}


def trained(suite: Suite) -> Suite:
    """The suite with experts whose steps lie along what is particular to their task's inputs.

    Noise as a step fits all samples alike, and such samples would count as those of no task.
    """
    suite = copy.copy(suite)
    suite.experts = {task: copy.deepcopy(expert) for task, expert in suite.experts.items()}
    for block, names in modules_of(suite.merged, suite.blocks).items():
        names = [name for name in names if is_linear(suite.merged, name)]
        features = {t: listen(suite.merged, b, block, names) for t, b in suite.inputs.items()}
        for name in (n for n in names if all(n in f.received for f in features.values())):
            inputs = {task: side.inputs(name) for task, side in features.items()}
            grams = {task: x.T @ x / x.square().sum() for task, x in inputs.items()}
            for number, (task, gram) in enumerate(grams.items()):
                values, vectors = torch.linalg.eigh(gram - sum(grams.values()) / len(grams))
                root = vectors * values.clamp_min(0).sqrt() @ vectors.T
                module: Any = suite.experts[task].get_submodule(name)
                weight = module.weight.data
                weight = weight.T if type(module).__name__ == "Conv1D" else weight
                step = normal(number, *weight.shape) @ root
                weight += 2 * step / step.norm().clamp_min(1e-9)
    return suite


class Run:
    """One calibration: its models in float64, and the parameters that it has changed."""

    def __init__(self, suite: Suite, masks: RowMasks, numbers: Numbers, seed: int) -> None:
        self.suite, self.masks, self.numbers, self.seed = suite, masks, numbers, seed
        pair = suite.merged, suite.base
        self.model, self.base = (copy.deepcopy(model).double().eval() for model in pair)
        self.experts = {t: copy.deepcopy(e).double().eval() for t, e in suite.experts.items()}
        self.changed: dict[str, None] = {}
        self.is_measured = False
        self.weigh(dict.fromkeys(self.experts, FAMILIAR), 1.0)

    def calibrate(self, block: str) -> None:
        names = [n for n in self.masks.modules[block] if is_linear(self.model, n)]
        mixtures, inputs = mixtures_in(self.model, [block]), self.suite.inputs

        def heard(models: Mapping[str, nn.Module]) -> dict[str, Seen]:
            return {t: listen(m, inputs[t], block, [*names, *mixtures]) for t, m in models.items()}

        expert_seen, ours = heard(self.experts), dict.fromkeys(self.experts, self.model)
        even = copy.copy(self.masks)
        even.heavy = None
        first = listen(self.model, next(iter(inputs.values())), block, names)
        for group in groups_of(first, names, self.masks):
            now = heard(ours)
            if not self.is_measured and self.masks.all_run(group[0]):
                # Whatever weighs more in some of them.
                entering = next(g for g in groups_of(first, names, even) if group[0] in g)
                self.weigh(*trust_in(entering, self, now))
                self.is_measured = True
            self.solve_modules(group, now, expert_seen)
        self.is_measured |= all(map(self.masks.all_run, mixtures or names[:1]))
        for name in mixtures:
            self.solve_slots(name, heard(ours), expert_seen)

    def weigh(self, trust: Mapping[str, float], agreement: float) -> None:
        """Set the energy of each task's rows from weights, relative to its samples.

        If the samples fit no task, all have that of many samples without trust.
        """
        gammas, lacks, only = {}, {}, agreement < UNLIKE and self.numbers.gamma > 0
        for task, value in trust.items():
            lacks[task] = max(ENOUGH / sum(map(size_of, self.suite.inputs[task])), 1)
            if only:  # like many samples of no trust
                value, lacks[task] = 0.0, 1
            familiar = min(max(value / FAMILIAR, LEAST), 1)
            gammas[task] = self.numbers.gamma * lacks[task] / familiar**2
        self.numbers = replace(self.numbers, gammas=gammas, lacks=lacks, vectors_only=only)

    def rows(self, name: str, task: str, seen: Seen) -> tuple[Tensor, Tensor, Tensor]:
        """Flags of the rows that count for a module, flags of those held out, and weights."""
        q, sample = self.masks.counting(name, task, seen.received[name])
        held_out = torch.isin(sample, held_out_samples(self.suite, task, self.seed))
        return q > 0, held_out[q > 0] & (len(self.numbers.ridges) > 1), q[q > 0]

    def solve_modules(
        self, group: list[str], ours: Mapping[str, Seen], expert_seen: Mapping[str, Seen]
    ) -> None:
        tables, biased = {}, self.masks.biased(group[0])
        for task, expert in self.experts.items():
            if group[0] not in ours[task].received:  # of texts alone
                continue
            used, held_out, q = self.rows(group[0], task, ours[task])
            u = expert_seen[task].outputs(group) - ours[task].outputs(group)
            x, matrix = ours[task].inputs(group[0]), parameters_of(expert, group)
            tables[task] = Table(x[used], u[used], held_out, q, *matrix)
        merged, base = (parameters_of(model, group) for model in (self.model, self.base))
        solved = solved_group(tables, merged, base[0], biased, self.numbers)
        new = by_name(self.model, group, solved, biased)
        load(self.model, new)
        self.changed |= dict.fromkeys(new)

    def solve_slots(
        self, name: str, ours: Mapping[str, Seen], expert_seen: Mapping[str, Seen]
    ) -> None:
        """Calibrate a mixture's slots, on the tokens that the calibrated model sends to each."""
        mixture, base = (model.get_submodule(name) for model in (self.model, self.base))
        tasks, biased = {}, self.masks.biased(name)
        for task, expert in self.experts.items():
            used, held_out, q = self.rows(name, task, ours[task])
            chosen = flat(ours[task].received[f"slots of {name}"])
            sides = ours[task].inputs(name), expert_seen[task].inputs(name), chosen
            tasks[task] = expert.get_submodule(name), *(side[used] for side in sides), held_out, q
        for slot in range(len(base.get_parameter("down_proj"))):
            for leaf in entry_and_exit(mixture):
                merged, tables = matrix_of(mixture, leaf, slot), dict[str, Table]()
                for task, (expert, x, expert_x, chosen, held_out, q) in tasks.items():
                    if tokens := sent_to(slot, chosen):
                        matrix, rows = matrix_of(expert, leaf, slot), (x[tokens], expert_x[tokens])
                        if leaf == "down_proj":
                            rows = inner(mixture, slot, rows[0]), inner(expert, slot, rows[1])
                        u = mapped(matrix, rows[1]) - mapped(merged, rows[0])
                        tables[task] = Table(rows[0], u, held_out[tokens], q[tokens], *matrix)
                if tables:  # a slot without tokens stays as merged
                    start = matrix_of(base, leaf, slot)[0]
                    new = solved_group(tables, merged, start, biased, self.numbers)
                    store(mixture, leaf, slot, new)
        changed = [leaf for leaf, _ in mixture.named_parameters(recurse=False)]
        self.changed |= {f"{name}.{leaf}": None for leaf in changed}


def heavy_targets(suite: Suite, masks: Any) -> Any:
    """Weights of all tokens, or None if no task has fewer targets than other tokens."""
    heavy, is_even = {}, True
    for task, batches in suite.inputs.items():
        flags = [before_targets(batch) for batch in batches]
        targets = sum(int(flag.sum()) for flag in flags)
        others = sum(int(mask.sum()) for mask in masks[task]) - targets
        factor, is_even = max(others / targets, 1), is_even and others <= targets
        pairs = zip(masks[task], flags, strict=True)
        heavy[task] = [mask * (1 + (factor - 1) * flag.double()) for mask, flag in pairs]
    return None if is_even else heavy


def held_out_samples(suite: Suite, task: str, seed: int) -> Tensor:
    """Numbers of the samples that are held out."""
    count = sum(map(size_of, suite.inputs[task]))
    digest = hashlib.sha256(f"held out {seed} {task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.randperm(count, generator=generator)[: count // HELD]


def listen(model: nn.Module, batches: list, block: str, names: list[str]) -> Seen:
    return Seen(*record(model, batches, [*dict.fromkeys([block, *names])], names))


def load(model: nn.Module, new: dict[str, Tensor]) -> None:
    for name, value in new.items():
        model.get_parameter(name).data.copy_(value)


def is_linear(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)).__name__.endswith(("Linear", "Conv1D", "Router"))


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
        bias = getattr(module, "bias", None)
        biases.append(weight.new_zeros(len(weights[-1])) if bias is None else bias.detach().clone())
    return torch.cat(weights), torch.cat(biases)


def trust_in(
    group: list[str], run: Run, ours: Mapping[str, Seen]
) -> tuple[dict[str, float], float]:
    """Likeness of each expert's weights to its samples beyond that to other tasks', and of all."""
    if len(run.experts) == 1:
        return dict.fromkeys(run.experts, FAMILIAR), 1.0
    start, grams, steps = parameters_of(run.base, group)[0], {}, {}
    for task, expert in run.experts.items():
        q, _ = run.masks.counting(group[0], task, ours[task].received[group[0]])
        x = ours[task].inputs(group[0])
        tau = parameters_of(expert, group)[0] - start
        grams[task], steps[task] = x[q > 0].T @ x[q > 0], tau.T @ tau

    def cosine(a: Tensor, b: Tensor) -> float:
        return float((a * b).sum() / (a.norm() * b.norm()))

    def mean_cosine(a: Tensor, matrices: Iterable[Tensor]) -> float:
        return fmean(cosine(a, b) for b in matrices)

    trust, overlaps, excesses = {}, [], []
    for task, step in steps.items():
        direct, overlap = cosine(step, grams[task]), mean_cosine(step, steps.values())
        trust[task] = (direct - mean_cosine(step, grams.values())) / (direct * (1 - overlap))
        # The logarithm of the ratio to the geometric mean over all tasks' samples.
        excesses.append(fmean(math.log(direct / cosine(step, b)) for b in grams.values()))
        overlaps.append(overlap)
    return trust, fmean(excesses) / (1 - fmean(overlaps))


def by_name(
    model: nn.Module, group: list[str], new: tuple[Tensor, Tensor], biased: bool
) -> dict[str, Tensor]:
    """Parameters of a group's modules."""
    sizes = [len(parameters_of(model, [name])[1]) for name in group]
    named, parts = {}, (part.split(sizes) for part in new)
    for name, weight, bias in zip(group, *parts, strict=True):
        is_turned = type(model.get_submodule(name)).__name__ == "Conv1D"
        named[f"{name}.weight"] = weight.T if is_turned else weight
        if biased:
            named[f"{name}.bias"] = bias
    return named
