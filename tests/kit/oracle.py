"""Slow reference of the paper's calibration, which imports nothing of the package.

Whole models run forward in float64, hooks keep every input of every calibrated module, and each
update is read off an explicit stacked least-squares system. Nothing is shared between modules and
nothing is summed on the way. It is meant for models of a few hundred parameters.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from slots_slow import entry_and_exit, inner, is_mixture, matrix_of, mixtures_in, sent_to, store
from torch import Tensor, nn
from torch.nn import functional

Batch = Tensor | Mapping  # one tensor, or keyword arguments
Masks = Sequence[Tensor] | None  # one `[samples, tokens]` per batch; None: all count one
Features = dict[str, list[Tensor]]  # by module name, one per call


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The choices of one calibration, by the paper's symbols."""

    alpha: float = 0.3
    lam: float = 0.05
    rho: float = 2.0
    eps: float = 1e-8
    bias: bool = True
    norm: bool = True


@dataclass
class Outcome:
    """The calibrated model (float64), and drift by block and task."""

    model: nn.Module
    # mean and relative
    drift: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Rows:
    """Rows `[n, d]` of one task and module on both sides, and weights `[n]` of sum one."""

    cal: Tensor
    exp: Tensor
    p: Tensor

    def target(self, alpha: float) -> Tensor:
        """Eq. 10."""
        return alpha * self.exp + (1 - alpha) * self.cal


def calibrate_slowly(
    merged: nn.Module,
    base: nn.Module,
    experts: Mapping[str, nn.Module],
    inputs: Mapping[str, Sequence[Batch]],
    blocks: Sequence[str],
    modules: Mapping[str, Sequence[str]],
    knobs: Knobs,
    row_weights: Mapping[str, Masks] | None = None,
    other_rows: Mapping[str, Mapping[str, Masks]] | None = None,
    features: torch.dtype = torch.float64,
) -> Outcome:
    """Calibrate a float64 copy of `merged`, block by block.

    `inputs` maps a task to its batches, `modules` a block to the full names of its modules, and
    `row_weights` a task to one `[samples, tokens]` tensor per batch (absent: every row counts one).
    `other_rows` has the weights of blocks and modules that see other rows. `features` is the dtype
    in which models run and keep their parameters. All else is always float64.
    """
    outcome = Outcome(model=copy.deepcopy(merged).double().eval())
    doubled = {task: copy.deepcopy(expert).double().eval() for task, expert in experts.items()}
    anchor = anchors(merged, base, knobs)
    other_masks, common = other_rows or {}, row_weights or dict.fromkeys(doubled)
    names = [name for block in blocks for name in modules[block]] + mixtures_in(merged, blocks)

    def recorded(models: Mapping[str, nn.Module]) -> dict[str, tuple[Features, Features]]:
        cast = {t: copy.deepcopy(m).to(features) for t, m in models.items()}
        return {task: record(m, inputs[task], names, blocks) for task, m in cast.items()}

    ours = dict.fromkeys(doubled, outcome.model)
    expert_features, features_now = recorded(doubled), recorded(ours)
    for block in blocks:
        if normalise_batches(outcome.model, inputs, block):
            features_now = recorded(ours)
        block_masks, new = other_masks.get(block, common), dict[str, Tensor]()
        for name in modules[block]:
            masks = other_masks.get(name, block_masks)
            shape = partial(as_rows, outcome.model.get_submodule(name))
            sides = features_now, expert_features
            rows = {
                task: gather(*(shape(s[task][0][name]) for s in sides), masks[task])
                for task in doubled
                if name in features_now[task][0]  # texts alone do not run a tower of images
            }
            new |= solve(name, outcome.model, doubled, anchor, rows, knobs)
        for name, value in new.items():
            outcome.model.get_parameter(name).data.copy_(value.to(features))
        normalise_batches(outcome.model, inputs, block)
        features_now = recorded(ours)
        for name in mixtures_in(outcome.model, [block]):
            entering = {
                task: entering_rows(name, now, expert_features[task][0], block_masks[task])
                for task, (now, _) in features_now.items()
                if name in now
            }
            solve_slots(name, outcome.model, doubled, anchor, entering, knobs)
            features_now = recorded(ours)
        for task in (task for task in doubled if block in features_now[task][1]):
            sides = features_now[task][1][block], expert_features[task][1][block]
            outcome.drift[block, task] = drift(gather(*sides, block_masks[task]))
    return outcome


def anchors(merged: nn.Module, base: nn.Module, knobs: Knobs) -> dict[str, Tensor]:
    """Eq. 11 for every parameter."""
    start = dict(base.named_parameters())
    return {
        name: knobs.rho * value.detach().double() + (1 - knobs.rho) * start[name].detach().double()
        for name, value in merged.named_parameters()
    }


def record(
    model: nn.Module, batches: Sequence[Batch], names: Sequence[str], blocks: Sequence[str]
) -> tuple[Features, Features]:
    """Inputs of modules and outputs of blocks in whole forward passes, by order of calls.

    The slots that a mixture's tokens are sent to have the name `slots of NAME`.
    """
    received, returned = Features(), Features()

    def keep(calls: Features, name: str, value: Any) -> None:
        tensor = value if isinstance(value, Tensor) else value[0]
        calls.setdefault(name, []).append(tensor.detach().double().clone())

    def receive(name: str, module: nn.Module, args: tuple, named: dict) -> None:
        values = (*args, *named.values())
        keep(received, name, values)
        if is_mixture(module):
            keep(received, f"slots of {name}", values[1])

    def give(name: str, _: nn.Module, args: tuple, result: Any) -> None:
        keep(returned, name, result)

    handles = [
        model.get_submodule(name).register_forward_pre_hook(
            partial(receive, name), with_kwargs=True
        )
        for name in names
    ]
    handles += [model.get_submodule(n).register_forward_hook(partial(give, n)) for n in blocks]
    for batch in batches:
        run(model, batch)
    for handle in handles:
        handle.remove()
    return received, returned


@torch.no_grad()
def run(model: nn.Module, batch: Batch) -> None:
    """One forward pass with floating-point inputs in the model's dtype."""
    dtype = next(model.parameters()).dtype

    def wide(value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    if isinstance(batch, Tensor):
        model(wide(batch))
    else:
        model(**{name: wide(value) for name, value in batch.items()})


def gather(cal: list[Tensor], exp: list[Tensor], row_weights: Masks) -> Rows:
    """All calls as one table of rows that count."""
    weights = []
    for index, feature in enumerate(cal):
        weight = feature.new_ones(feature.shape[:-1])
        if row_weights is not None:
            weight = weight * row_weights[index].double().reshape(weight.shape)
        weights.append(weight.reshape(-1))
    weight = torch.cat(weights)
    counted = weight > 0
    flat = [torch.cat([f.reshape(-1, f.shape[-1]) for f in side])[counted] for side in (cal, exp)]
    return Rows(cal=flat[0], exp=flat[1], p=weight[counted] / weight[counted].sum())


def solve(
    name: str,
    model: nn.Module,
    experts: Mapping[str, nn.Module],
    anchor: Mapping[str, Tensor],
    rows: Mapping[str, Rows],
    knobs: Knobs,
) -> dict[str, Tensor]:
    """New parameters of one module, by parameter name."""
    module: Any = model.get_submodule(name)
    expert_modules: dict[str, Any] = {
        task: expert.get_submodule(name) for task, expert in experts.items()
    }
    kind, pair = type(module).__name__, (f"{name}.weight", f"{name}.bias")
    if kind.endswith(("LayerNorm", "GroupNorm")):
        if not knobs.norm:
            return {}
        z = {t: (r.cal if kind == "GroupNorm" else normalised(r.cal, module.eps), r.p)
             for t, r in rows.items()}  # fmt: skip
        affines = {task: (t.weight.detach(), t.bias.detach()) for task, t in expert_modules.items()}
        new = stacked_norm(z, affines, (anchor[pair[0]], anchor[pair[1]]), knobs.lam)
        return dict(zip(pair, new, strict=True))
    has_bias = getattr(module, "bias", None) is not None
    is_turned, biased = kind == "Conv1D", knobs.bias and has_bias

    def linear_map(weight: Tensor, bias: Any) -> tuple[Tensor, Any]:
        """`[outputs, inputs]` and bias. GPT-2's Conv1D stores inputs first."""
        matrix = (weight.T if is_turned else weight).detach().double().flatten(1)
        return matrix, bias.detach().double() if biased else None

    maps = {
        task: linear_map(their.weight, getattr(their, "bias", None))
        for task, their in expert_modules.items()
    }
    start = linear_map(anchor[pair[0]], anchor.get(pair[1]))
    weight, bias = solve_linear(rows, maps, start, knobs)
    new = {pair[0]: weight.T if is_turned else weight.reshape(module.weight.shape)}
    return new | {pair[1]: bias} if biased else new


def solve_linear(
    rows: Mapping[str, Rows],
    maps: Mapping[str, tuple[Tensor, Any]],
    anchor: tuple[Tensor, Any],
    knobs: Knobs,
) -> tuple[Tensor, Any]:
    """New weight `[m, d]` and new bias, if there is one (Eqs. 13 to 15, 51 to 55).

    One tall system in W'. eps pulls towards zero, not towards the anchor.
    """
    moments = {t: torch.einsum("n,ni,nj->ij", r.p, r.cal, r.cal) for t, r in rows.items()}
    scales = {t: (r.p / moments[t].square().sum().sqrt()).sqrt()[:, None] for t, r in rows.items()}
    eye = torch.eye(anchor[0].shape[1], dtype=torch.float64)
    pieces = [(knobs.lam**0.5 * eye, knobs.lam**0.5 * anchor[0].T)]
    pieces.append((knobs.eps**0.5 * eye, torch.zeros_like(anchor[0].T)))
    outputs = {task: r.target(knobs.alpha) @ maps[task][0].T for task, r in rows.items()}
    pieces += [(scales[task] * r.cal, scales[task] * outputs[task]) for task, r in rows.items()]
    new = least_squares(pieces).T
    if anchor[1] is None:
        return new, None
    # a constant explains a part of the error that the new weight leaves
    errors = {task: maps[task][1] + outputs[task] - r.cal @ new.T for task, r in rows.items()}
    pieces = [(scales[task], scales[task] * errors[task]) for task in rows]
    pull = torch.full((1, 1), knobs.lam**0.5, dtype=torch.float64)
    pieces.append((pull, pull * anchor[1]))
    return new, least_squares(pieces)[0]


def least_squares(pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Solution of all the equations stacked on one another."""
    system, target = (torch.cat(side, -2) for side in zip(*pieces, strict=True))
    return torch.linalg.lstsq(system, target).solution


def normalised(x: Tensor, eps: float) -> Tensor:
    """Input of a norm's gain and shift."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def stacked_norm(
    rows: Mapping[str, tuple[Tensor, Tensor]],
    affines: Mapping[str, tuple[Tensor, Tensor]],
    anchor: tuple[Tensor, Tensor],
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Eq. 56-59 for normalised inputs `[n, d]`: per channel two unknowns, of equal tasks."""
    pair = torch.stack([part.double() for part in anchor], -1)[..., None]  # [d, 2, 1]
    pull = lam**0.5 * torch.eye(2, dtype=torch.float64)
    pieces = [(pull.expand(len(pair), 2, 2), lam**0.5 * pair)]
    for task, (z, p) in rows.items():
        gain, shift = affines[task]
        unknowns = torch.stack([z, torch.ones_like(z)], -1).transpose(0, 1)  # [d, n, 2]
        scale = p.sqrt()[:, None]
        pieces.append((scale * unknowns, scale * (z * gain + shift).T[..., None]))
    gain, shift = least_squares(pieces)[..., 0].unbind(1)
    return gain, shift


def drift(rows: Rows) -> tuple[float, float]:
    """Mean over rows of |h_cal - h_exp| (Eq. 2), and root mean square relative to |h_exp|."""
    squares = (rows.cal - rows.exp).square().sum(dim=-1)
    power = rows.p @ rows.exp.square().sum(dim=-1)
    return float(rows.p @ squares.sqrt()), float((rows.p @ squares / power).sqrt())


# Routed experts, token by token.


def entering_rows(
    name: str, ours: Features, expert_inputs: Features, row_weights: Masks
) -> tuple[Rows, Tensor]:
    """Tokens of one task that enter a mixture, and the slots that the calibrated model chooses."""
    slots = ours[f"slots of {name}"]
    return gather(ours[name], expert_inputs[name], row_weights), gather(
        slots, slots, row_weights
    ).cal


def solve_slots(
    name: str,
    model: nn.Module,
    experts: Mapping[str, nn.Module],
    anchor: Mapping[str, Tensor],
    entering: Mapping[str, tuple[Rows, Tensor]],
    knobs: Knobs,
) -> None:
    """Calibrate the slots of a mixture, on the tokens that the calibrated model sends to each.

    Entry and exit are solved in one turn: the exit receives what the merged entry gives.
    """
    ours: Any = model.get_submodule(name)
    task_mixtures = {task: expert.get_submodule(name) for task, expert in experts.items()}
    start, biased = copy.deepcopy(ours), knobs.bias and ours.has_bias
    for leaf, parameter in start.named_parameters():
        parameter.data.copy_(anchor[f"{name}.{leaf}"])

    def linear_map(mixture: Any, leaf: str, slot: int) -> tuple[Tensor, Any]:
        weight, bias = matrix_of(mixture, leaf, slot)
        return weight, bias if biased else None

    for slot in range(len(ours.down_proj)):
        at_entry, at_exit = dict[str, Rows](), dict[str, Rows]()
        for task, (rows, chosen) in entering.items():
            if tokens := sent_to(slot, chosen):
                x, expert_x, p = rows.cal[tokens], rows.exp[tokens], rows.p[tokens]
                at_entry[task] = Rows(x, expert_x, p / p.sum())
                inside = inner(ours, slot, x), inner(task_mixtures[task], slot, expert_x)
                at_exit[task] = Rows(*inside, p / p.sum())
        for leaf, task_rows in zip(entry_and_exit(ours), (at_entry, at_exit), strict=True):
            if task_rows:  # a slot without tokens stays as merged
                maps = {task: linear_map(task_mixtures[task], leaf, slot) for task in task_rows}
                solved = solve_linear(task_rows, maps, linear_map(start, leaf, slot), knobs)
                store(ours, leaf, slot, solved)


# Convolutions and BatchNorms, position by position.


def as_rows(module: Any, features: list[Tensor]) -> list[Tensor]:
    """Inputs of a module with a row for each position, `[n, ..., d]`."""
    if isinstance(module, nn.Conv2d):
        return [patches(module, x) for x in features]
    if type(module).__name__ == "GroupNorm":
        whole = [x.reshape(len(x), module.num_groups, -1) for x in features]
        features = [normalised(w, module.eps).reshape(x.shape)
                    for w, x in zip(whole, features, strict=True)]  # fmt: skip
        return [x.movedim(1, -1) for x in features]
    if getattr(module, "data_format", "") == "channels_first":
        return [x.movedim(1, -1) for x in features]
    return features


def patches(module: Any, x: Tensor) -> Tensor:
    """Every patch that the kernel sees, `[n, positions, in * kernel]`."""
    spans = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    if module.padding == "same":
        pairs = [(span // 2, span - span // 2) for span in spans]
    else:
        pairs = [(p, p) for p in module.padding]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = functional.pad(x, [side for pair in pairs[::-1] for side in pair], mode=mode)
    for axis, span in enumerate(spans):
        x = x.unfold(axis + 2, span + 1, module.stride[axis])[..., :: module.dilation[axis]]
    return x.movedim(1, 3).flatten(3).flatten(1, 2)


def normalise_batches(model: nn.Module, inputs: Any, block: str) -> bool:
    """Give a block's BatchNorms statistics from whole forward passes. Return whether it has any."""
    inside = model.get_submodule(block).named_modules(prefix=block)
    norms = [name for name, module in inside if "BatchNorm" in type(module).__name__]
    in_order = record(model, next(iter(inputs.values()))[:1], norms, [])[0] if norms else {}
    for name in in_order:
        module: Any = model.get_submodule(name)
        rows, weights = [], []
        for batches in inputs.values():
            received, _ = record(model, batches, [name], [])
            x = torch.cat([x.movedim(1, -1).reshape(-1, x.shape[1]) for x in received[name]])
            rows.append(x)
            weights.append(x.new_full((len(x),), 1 / (len(x) * len(inputs))))
        table, weight = torch.cat(rows), torch.cat(weights)
        mean = weight @ table
        module.running_mean.copy_(mean)
        module.running_var.copy_(weight @ (table - mean).square())
    return bool(norms)
