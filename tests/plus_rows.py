"""Rows of the oracle of FeatCal+: which modules go together, and what each of them sees.

The modules that write to the residual stream are listed by hand, not detected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from calibrations import counted_rows
from oracle import Batch, Features, Models, run
from tiny_models import Suite, modules_of
from torch import Tensor, nn

FOLDS = 4
ALL_ROWS = ("k_proj", "v_proj")  # what reads every token of CLIP's last block

# Ends of the names of modules whose output is added to the hidden features as it is.
WRITERS = (
    *("self_attn.out_proj", "mlp.fc2"),  # CLIP; Phi: fc2
    *("self_attn.o_proj", "mlp.down_proj"),  # Llama and many like it, Cohere's parallel branches
    *("attn.c_proj", "mlp.c_proj"),  # GPT-2
    *("attention.dense", "mlp.dense_4h_to_h"),  # GPT-NeoX, parallel
    *("self_attn.dense", "mlp.fc2"),  # Phi, parallel
    *("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo"),  # T5
)
# A norm or a multiplier stands between.
WITHOUT_WRITERS = ("Gemma2DecoderLayer", "Olmo2DecoderLayer", "GraniteDecoderLayer")
# Blocks of tricky_models.py, by the name of the function that makes them.
TRICKY_WRITERS = {"through_only": ("only",), "keyword_calls": ("second",), "chain": ("second",)}


@dataclass
class Seen:
    """One model's features for one task: module inputs, the block's among them, and outputs."""

    received: Features
    returned: Features

    def inputs(self, name: str) -> Tensor:
        return flat(self.received[name])

    def outputs(self, names: Sequence[str]) -> Tensor:
        return torch.cat([flat(self.returned[name]) for name in names], dim=1)


@dataclass
class Table:
    """Rows of one group over all tasks: inputs, both drifts, weights and folds."""

    x: Tensor
    own: Tensor
    full: Tensor
    p: Tensor
    fold: Tensor

    def only(self, keep: Tensor) -> "Table":
        return Table(self.x[keep], self.own[keep], self.full[keep], self.p[keep], self.fold[keep])


class RowMasks:
    """Rows that count for a module, and all else that modules of one group have in common."""

    def __init__(self, suite: Suite, settings: Any) -> None:
        modules = modules_of(suite.merged, suite.blocks)
        self.suite, self.settings = suite, settings
        self.common, self.other = counted_rows(suite, modules, settings.decoder_rows)

    def masks(self, name: str) -> Any:
        """Masks of every task's batches, or None."""
        others = self.other or {}
        block = next(b for b in self.suite.blocks if name.startswith(f"{b}."))
        return others.get(name, others.get(block, self.common))

    def biased(self, name: str) -> bool:
        module: Any = self.suite.merged.get_submodule(name)
        return module.bias is not None and self.settings.calibrate_bias

    def closing(self, name: str) -> bool:
        """True where only the first token is read behind the module."""
        last = self.suite.blocks[-1]
        is_clip = type(self.suite.merged.get_submodule(last)).__name__ == "CLIPEncoderLayer"
        is_last = self.suite.family == "auto" and is_clip and name.startswith(f"{last}.")
        return is_last and not name.endswith(ALL_ROWS)

    def kind(self, name: str, writers: Sequence[str]) -> tuple:
        alone = name if name in writers else ""
        return self.biased(name), self.closing(name), id(self.masks(name)), alone

    def counting(self, name: str, task: str, calls: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Weight and sample of every row of a module's inputs."""
        batches, masks = self.suite.inputs[task], self.masks(name)
        sizes = [len(b if isinstance(b, Tensor) else next(iter(b.values()))) for b in batches]
        weights, samples = [], []
        for index, call in enumerate(calls):
            batch = index * len(batches) // len(calls)  # a module may run several times a batch
            weight = call.new_ones(call.shape[:-1])
            if masks is not None:
                weight = weight * masks[task][batch].double().reshape(weight.shape)
            if self.closing(name):
                weight[:, 1:] = 0
            sample = sum(sizes[:batch]) + torch.arange(len(call))
            weights.append(weight.reshape(-1))
            samples.append(sample.repeat_interleave(weight[0].numel()))
        return torch.cat(weights), torch.cat(samples)


def is_linear(model: nn.Module, name: str) -> bool:
    return type(model.get_submodule(name)).__name__ in ("Linear", "Conv1D")


def flat(calls: list[Tensor]) -> Tensor:
    return torch.cat([call.reshape(-1, call.shape[-1]) for call in calls])


def writers_of(model: nn.Module, block: str, names: Sequence[str]) -> list[str]:
    module: Any = model.get_submodule(block)
    kind = type(module).__name__
    ends = () if kind in WITHOUT_WRITERS else WRITERS
    if kind == "Block":
        ends = TRICKY_WRITERS.get(module.run.__name__, ())
    return [name for name in names if name.endswith(tuple(f".{end}" for end in ends))]


def groups_of(model: nn.Module, batch: Batch, names: Sequence[str], kind: Any) -> list[list[str]]:
    """Modules of one kind that receive the same tensors, in the order of their first calls."""
    received: dict[str, list[Tensor]] = {}  # keeps the tensors alive: no two have the same id

    def note(name: str, _: nn.Module, args: tuple, named: dict) -> None:
        received.setdefault(name, []).append((args or tuple(named.values()))[0])

    handles = [
        model.get_submodule(name).register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name in names
    ]
    with torch.no_grad():
        run(model, batch)
    for handle in handles:
        handle.remove()
    groups: dict[Any, list[str]] = {}
    for name, tensors in received.items():
        groups.setdefault((*map(id, tensors), kind(name)), []).append(name)
    return list(groups.values())


def parameters_of(model: nn.Module, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Weights `[m, d]` and biases of modules on top of one another; no bias is a zero one."""
    weights, biases = [], []
    for name in names:
        module: Any = model.get_submodule(name)
        weight = module.weight.detach().clone()
        weights.append(weight.T if type(module).__name__ == "Conv1D" else weight)
        zero = weight.new_zeros(len(weights[-1]))
        biases.append(zero if module.bias is None else module.bias.detach().clone())
    return torch.cat(weights), torch.cat(biases)


def rows_of(
    group: list[str],
    model: nn.Module,
    experts: Models,
    ours: dict[str, Seen],
    theirs: dict[str, Seen],
    masks: RowMasks,
    written: list[str],
    factors: Mapping[str, float],
) -> Table:
    """The table of a group; `written`: a writer's block, the writers before it, and itself."""
    parts = []
    weight, bias = parameters_of(model, group)
    for task, expert in experts.items():
        q, sample = masks.counting(group[0], task, ours[task].received[group[0]])
        keep = q > 0
        x, wanted = ours[task].inputs(group[0])[keep], theirs[task].outputs(group)[keep]
        full = wanted - ours[task].outputs(group)[keep]
        if written:
            full = (stream(theirs[task], written) - stream(ours[task], written))[keep]
        their_weight, their_bias = parameters_of(expert, group)
        own = x @ (their_weight - weight).T + (their_bias - bias)
        p = factors.get(task, 1.0) * q[keep] / (q[keep] @ wanted.square().sum(dim=1))
        parts.append((x, own, full, p, sample[keep] % FOLDS))
    return Table(*(torch.cat(column) for column in zip(*parts, strict=True)))


def stream(seen: Seen, written: list[str]) -> Tensor:
    """Hidden features behind a writer: what the block received, and what writers added to it."""
    return seen.inputs(written[0]) + sum(seen.outputs([name]) for name in written[1:])
