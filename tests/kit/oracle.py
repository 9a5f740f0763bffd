"""A second opinion on the calibration: slow, plain, and independent of the package.

Whole models run forward in float64, hooks keep every input of every calibrated module, and each
update is read off an explicit stacked least-squares system. Nothing is shared between modules,
nothing is summed on the way, nothing of the package is imported: what the two agree on is unlikely
to be a mistake they have in common. It is meant for models of a few hundred parameters.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from conv_oracle import as_rows, is_convolution, normalise_batches, of_groups
from torch import Tensor, nn

Batch = Tensor | Mapping  # one tensor, or keyword arguments
Masks = Sequence[Tensor] | None  # one `[samples, tokens]` a batch; None: all count one
Models = Mapping[str, nn.Module]
Features = dict[str, list[Tensor]]  # by module name, one a call

CLASS_TOKEN_ONLY = 0.01  # what the demo's rule leaves to the other tokens of the last block


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The choices of one calibration, by the paper's symbols."""

    alpha: float = 0.3
    lam: float = 0.05
    rho: float = 2.0
    eps: float = 0.0
    bias: bool = True
    norm: bool = True
    demo_last_block: bool = False


@dataclass
class Outcome:
    """The calibrated model (float64), and each block's drift by task, from `drift`.

    Four numbers: mean and relative drift before the block's update, mean and relative after it.
    """

    model: nn.Module
    drift: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)


@dataclass
class Rows:
    """What one task shows to one module: rows `[n, d]` of both sides and `[n]` weights, sum one."""

    cal: Tensor
    exp: Tensor
    p: Tensor

    def target(self, alpha: float) -> Tensor:
        """Eq. 10."""
        return alpha * self.exp + (1 - alpha) * self.cal


def calibrate_slowly(
    merged: nn.Module,
    base: nn.Module | None,
    experts: Models,
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
    `row_weights` a task to one `[samples, tokens]` tensor per batch (absent: every row counts one),
    `other_rows` the full name of a block or module that sees other rows to the like. `features` is
    the dtype in which models run and keep their parameters; all else is float64 always.
    """
    outcome = Outcome(model=copy.deepcopy(merged).double().eval())
    doubled = {task: copy.deepcopy(expert).double().eval() for task, expert in experts.items()}
    anchor = anchors(merged, base, knobs)
    common = row_weights or dict.fromkeys(doubled)
    names = [name for block in blocks for name in modules[block]]

    def recorded(model: nn.Module, task: str) -> tuple[Features, Features]:
        return record(in_dtype(model, features), inputs[task], names, blocks)

    theirs = {task: recorded(expert, task) for task, expert in doubled.items()}
    seen = {task: recorded(outcome.model, task) for task in doubled}
    for block in blocks:
        if normalise_batches(outcome.model, inputs, block):
            seen = {task: recorded(outcome.model, task) for task in doubled}
        block_masks = (other_rows or {}).get(block, common)
        new: dict[str, Tensor] = {}
        for name in modules[block]:
            light = block == blocks[-1] and not name.endswith(("k_proj", "v_proj"))
            light = light and knobs.demo_last_block
            masks = (other_rows or {}).get(name, block_masks)
            shape = partial(as_rows, outcome.model.get_submodule(name))
            rows = {
                task: gather(
                    shape(seen[task][0][name]), shape(theirs[task][0][name]), masks[task], light
                )
                for task in doubled
            }
            new.update(solve(name, outcome.model, doubled, anchor, rows, knobs))
        with torch.no_grad():
            for name, value in new.items():
                outcome.model.get_parameter(name).copy_(value.to(features))
        normalise_batches(outcome.model, inputs, block)
        before, seen = seen, {task: recorded(outcome.model, task) for task in doubled}
        for task in doubled:
            features_of_expert, read = theirs[task][1][block], block_masks[task]
            if block == blocks[-1] and has_class_token(merged):
                read = [only_first(features) for features in features_of_expert]
            outcome.drift[block, task] = tuple(
                value
                for side in (before, seen)
                for value in drift(side[task][1][block], features_of_expert, read)
            )
    return outcome


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself if it has that dtype, else a copy that does."""
    same = next(model.parameters()).dtype == dtype
    return model if same else copy.deepcopy(model).to(dtype)


def anchors(merged: nn.Module, base: nn.Module | None, knobs: Knobs) -> dict[str, Tensor]:
    """Eq. 11 for every parameter; without a base, which rho = 1 does not need, the merged ones."""
    if base is None:
        if knobs.rho != 1:
            raise ValueError(f"rho = {knobs.rho} needs a base model")
        base = merged
    start = dict(base.named_parameters())
    return {
        name: knobs.rho * value.detach().double() + (1 - knobs.rho) * start[name].detach().double()
        for name, value in merged.named_parameters()
    }


def record(
    model: nn.Module, batches: Sequence[Batch], names: Sequence[str], blocks: Sequence[str]
) -> tuple[Features, Features]:
    """Run whole forward passes; keep every input of the named modules and every block's output."""
    received: Features = {name: [] for name in names}
    returned: Features = {name: [] for name in blocks}

    def keep(place: list[Tensor], value: Any) -> None:
        tensor = value if isinstance(value, Tensor) else value[0]
        place.append(tensor.detach().double().clone())

    def receive(place: list[Tensor], _: nn.Module, args: tuple, named: dict) -> None:
        keep(place, args or tuple(named.values()))

    def give(place: list[Tensor], _: nn.Module, args: tuple, result: Any) -> None:
        keep(place, result)

    handles = []
    for name, place in received.items():
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(receive, place), with_kwargs=True))
    for name, place in returned.items():
        handles.append(model.get_submodule(name).register_forward_hook(partial(give, place)))
    try:
        with torch.no_grad():
            for batch in batches:
                run(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return received, returned


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


def gather(cal: list[Tensor], exp: list[Tensor], row_weights: Masks, light: bool) -> Rows:
    """All calls as one table of rows, those of weight zero left out, whatever they hold.

    `light` turns down all tokens but the first.
    """
    weights = []
    for index, feature in enumerate(cal):
        weight = feature.new_ones(feature.shape[:-1])
        if row_weights is not None:  # a module may run several times a batch
            mask = row_weights[index * len(row_weights) // len(cal)]
            if weight.ndim != 2 or weight.shape == mask.shape:  # else a table of relative positions
                weight = weight * mask.double().reshape(weight.shape)
        if light:
            weight[:, 1:] *= CLASS_TOKEN_ONLY
        weights.append(weight.reshape(-1))
    weight = torch.cat(weights)
    count = weight > 0
    flat = [torch.cat([f.reshape(-1, f.shape[-1]) for f in side])[count] for side in (cal, exp)]
    return Rows(cal=flat[0], exp=flat[1], p=weight[count] / weight[count].sum())


def solve(
    name: str,
    model: nn.Module,
    experts: Models,
    anchor: Mapping[str, Tensor],
    rows: Mapping[str, Rows],
    knobs: Knobs,
) -> dict[str, Tensor]:
    """New parameters of one module, by parameter name."""
    module: Any = model.get_submodule(name)
    theirs: dict[str, Any] = {task: expert.get_submodule(name) for task, expert in experts.items()}
    if type(module).__name__.endswith(("LayerNorm", "GroupNorm")):
        if not knobs.norm:
            return {}
        pair = (f"{name}.weight", f"{name}.bias")
        done = type(module).__name__ == "GroupNorm"  # where rows were normalised
        inputs = {
            task: (r.cal if done else normalised(r.cal, module.eps), r.p)
            for task, r in rows.items()
        }
        affines = {task: (t.weight.detach(), t.bias.detach()) for task, t in theirs.items()}
        new = stacked_norm(inputs, affines, (anchor[pair[0]], anchor[pair[1]]), knobs.lam)
        return dict(zip(pair, new, strict=True))
    if is_convolution(module):
        return of_groups(name, module, theirs, anchor, rows, knobs)
    turned = type(module).__name__ == "Conv1D"  # this one stores inputs x outputs

    def upright(weight: Tensor) -> Tensor:
        weight = weight.detach().double()
        return weight.T if turned else weight

    weights = {task: upright(their.weight) for task, their in theirs.items()}
    biases = None
    if knobs.bias and module.bias is not None:
        biases = {task: their.bias.detach().double() for task, their in theirs.items()}
    anchors = (upright(anchor[f"{name}.weight"]), anchor.get(f"{name}.bias"))
    new, bias = solve_linear(rows, weights, biases, anchors, knobs)
    solved = {f"{name}.weight": new.T if turned else new}
    return solved if bias is None else solved | {f"{name}.bias": bias}


def solve_linear(
    rows: Mapping[str, Rows],
    weights: Mapping[str, Tensor],
    biases: Mapping[str, Tensor] | None,
    anchors: tuple[Tensor, Tensor | None],
    knobs: Knobs,
) -> tuple[Tensor, Tensor | None]:
    """New weight `[m, d]`, and new bias where the experts' are given.

    Without a bias anchor, lambda does not pull the bias.
    """
    task_weight = {task: 1 / second_moment(r).square().sum().sqrt() for task, r in rows.items()}
    new = stacked_weight(rows, weights, anchors[0], task_weight, knobs)
    if biases is None:
        return new, None
    errors = {
        task: biases[task] + r.target(knobs.alpha) @ weights[task].T - r.cal @ new.T
        for task, r in rows.items()
    }
    return new, stacked_bias(rows, errors, anchors[1], task_weight, knobs.lam)


def second_moment(rows: Rows) -> Tensor:
    """Eq. 13, left."""
    return torch.einsum("n,ni,nj->ij", rows.p, rows.cal, rows.cal)


def least_squares(pieces: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Solution of all the equations stacked on one another."""
    return torch.linalg.lstsq(*(torch.cat(side) for side in zip(*pieces, strict=True))).solution


def stacked_weight(
    rows: Mapping[str, Rows],
    weights: Mapping[str, Tensor],
    anchor: Tensor,
    task_weight: Mapping[str, Tensor],
    knobs: Knobs,
) -> Tensor:
    """Eq. 15 as one tall system in W'; eps pulls towards zero, not towards the anchor."""
    eye = torch.eye(anchor.shape[1], dtype=torch.float64)
    pieces = [(knobs.lam**0.5 * eye, knobs.lam**0.5 * anchor.T)]
    pieces.append((knobs.eps**0.5 * eye, torch.zeros_like(anchor.T)))
    for task, r in rows.items():
        scale = (task_weight[task] * r.p).sqrt()[:, None]
        pieces.append((scale * r.cal, scale * (r.target(knobs.alpha) @ weights[task].T)))
    return least_squares(pieces).T


def stacked_bias(
    rows: Mapping[str, Rows],
    errors: Mapping[str, Tensor],
    anchor: Tensor | None,
    task_weight: Mapping[str, Tensor],
    lam: float,
) -> Tensor:
    """Eq. 51-55: what a constant can still explain of the error that the new weight leaves."""
    pieces = []
    for task, r in rows.items():
        scale = (task_weight[task] * r.p).sqrt()[:, None]
        pieces.append((scale, scale * errors[task]))
    if anchor is not None:
        pieces.append((pieces[0][0].new_full((1, 1), lam**0.5), lam**0.5 * anchor[None]))
    return least_squares(pieces)[0]


def normalised(x: Tensor, eps: float) -> Tensor:
    """Input of a LayerNorm's gain and shift."""
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + eps).sqrt()


def stacked_norm(
    rows: Mapping[str, tuple[Tensor, Tensor]],
    affines: Mapping[str, tuple[Tensor, Tensor]],
    anchor: tuple[Tensor, Tensor] | None,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Eq. 56-59: per channel two unknowns, every task weighing the same.

    `rows` holds normalised inputs `[n, d]` and weights `[n]` of sum one.
    """
    solved: list[Tensor] = []
    for channel in range(len(next(iter(affines.values()))[0])):
        pieces = []
        for task, (inputs, p) in rows.items():
            z, scale = inputs[:, channel], p.sqrt()
            gain, shift = (part[channel] for part in affines[task])
            left = torch.stack([scale * z, scale], dim=1)
            pieces.append((left, (scale * (z * gain + shift))[:, None]))
        if anchor is not None:
            pair = torch.stack([part[channel] for part in anchor])[:, None]
            pieces.append((lam**0.5 * torch.eye(2, dtype=torch.float64), lam**0.5 * pair))
        solved.append(least_squares(pieces)[:, 0])
    gain, shift = torch.stack(solved, dim=1)
    return gain, shift


def has_class_token(model: nn.Module) -> bool:
    """Return whether nothing but the first position is read behind the last block."""
    return any(name.endswith("class_embedding") for name, _ in model.named_parameters())


def only_first(features: Tensor) -> Tensor:
    """A mask of the first position of each sample, given features `[batch, positions, d]`."""
    mask = torch.zeros(features.shape[:2])
    mask[:, 0] = 1
    return mask


def drift(cal: list[Tensor], exp: list[Tensor], row_weights: Masks) -> tuple[float, float]:
    """Mean over rows of |h_cal - h_exp| (Eq. 2), and root mean square relative to |h_exp|."""
    rows = gather(cal, exp, row_weights, light=False)
    squares = (rows.cal - rows.exp).square().sum(dim=-1)
    power = rows.p @ rows.exp.square().sum(dim=-1)
    return float(rows.p @ squares.sqrt()), float((rows.p @ squares / power).sqrt())
