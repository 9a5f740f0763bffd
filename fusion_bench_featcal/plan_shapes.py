"""Reads and memory of a calibration, computed from names and shapes."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.experts.reads import grants
from fusion_bench_featcal.families import Family, resolve_family
from fusion_bench_featcal.feature_shapes import LENGTH, Features, features_of, takes_images
from fusion_bench_featcal.memory import divided
from fusion_bench_featcal.modules.groups import CROSS, Group, groups_by_name
from fusion_bench_featcal.modules.models import (
    names_in_order,
    tensors_before_stage,
    tensors_of_block,
)
from fusion_bench_featcal.modules.sites import BlockModules, find_all_modules
from fusion_bench_featcal.rules import Rule, rule_of
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.samples import number_held_out, number_of_copies
from fusion_bench_featcal.streams.task_rows import sums_of

CPU = torch.device("cpu")
SYSTEMS = 2
"""Matrices in float64, of the widest module's inputs, that a solve takes."""


@dataclass(frozen=True)
class Request:
    """A calibration to plan."""

    model: nn.Module  # structure of the merged model, on the meta device
    settings: FeatCalSettings
    tasks: int
    length: int | None = LENGTH  # tokens of a text, or an image's side if it is not in the config
    target_length: int = 8  # tokens of an encoder-decoder's target
    samples: Sequence[int] = ()  # per task; empty: `samples_per_task`
    whole: int = 0  # experts and bases that are loaded whole
    loaded: int = 0  # models already in this process's memory, with the merged one
    streamed: bool = False  # the merged model is read block by block, and the result written so
    itemsize: int | None = None  # bytes per number in the models' files; None: as in the model
    fetches: int = 0  # models that must be fetched from the hub
    device: torch.device = CPU
    processes: int = 1

    @property
    def share(self) -> float:
        """Return the busiest process's share of the tasks."""
        return math.ceil(self.tasks / self.processes) / self.tasks


@dataclass(frozen=True)
class Shapes:
    """A request's model, its blocks and the modules that are calibrated."""

    request: Request
    family: Family
    model: nn.Module
    rule: Rule
    stages: Sequence[Sequence[str]]
    modules: Mapping[str, BlockModules]

    @classmethod
    def of(cls, request: Request) -> "Shapes":
        """Find blocks and modules.

        Raises:
            CalibrationError: If the model cannot be calibrated.
            ValueError: If no family fits it.
        """
        settings = request.settings
        family = resolve_family(settings.family, request.model)
        model = family.view.shown(request.model)
        stages, rule = family.stages(model), rule_of(settings)
        modules = find_all_modules(model, stages, settings, calibrate_norm=rule.calibrate_norm)
        return cls(request, family, model, rule, stages, modules)

    @property
    def size(self) -> int:
        """Return the bytes of the model, tied tensors once."""
        return size_of(self.model.state_dict(keep_vars=True).values())

    @property
    def itemsize(self) -> int:
        """Return the bytes per number of the model."""
        return next(self.model.parameters()).itemsize

    @property
    def stored(self) -> int:
        """Return the bytes per number in the models' files."""
        return self.request.itemsize or self.itemsize

    @property
    def samples(self) -> list[int]:
        """Return the number of samples of each task."""
        request, most = self.request, self.request.settings.samples_per_task
        return [min(count, most) for count in request.samples or [most] * request.tasks]

    @property
    def runs_experts(self) -> bool:
        """Return whether experts run."""
        return self.rule.runs_experts or self.request.settings.log_drift

    def reads(self) -> tuple[int, int]:
        """Return the bytes read of all experts, within the budget, and of the base."""
        request, settings, model = self.request, self.request.settings, self.model
        runs, calibrated = self.runs_experts, self.modules
        names = names_in_order(model, self.family, self.stages, calibrated, runs_experts=runs)
        tensors = model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(tensors.items())}
        tied = {name: first[id(tensor)] for name, tensor in tensors.items()}
        sizes = {name: tensors[name].numel() * self.stored for name in tied.values()}
        of_expert = {name: (tied[name], sizes[tied[name]]) for name in names}
        experts = {str(task): of_expert for task in range(request.tasks)}
        anchors = {tied[n] for m in calibrated.values() for site in m.sites for n in site.names}
        read = grants(settings.expert_read_budget, experts).bytes or 0
        return read, sum(sizes[name] for name in anchors) * self.rule.reads_base

    @property
    def outside(self) -> int:
        """Return the bytes of the tensors before the first block."""
        names = tensors_before_stage(self.model, self.family, self.stages, 0)
        tensors = self.model.state_dict(keep_vars=True)
        return size_of(tensors[name] for name in names)

    def memory(self) -> dict[str, int]:
        """Return the bytes of each part of the memory, at the block where it is largest.

        `together` are features and sums in the turn in which both take most.
        """
        request = self.request
        lengths = request.length, request.target_length
        received = features_of(self.family, self.model, self.stages, *lengths)
        at_blocks = [self._memory_at(block, received[block]) for block in self.modules]
        return {part: max(sizes[part] for sizes in at_blocks) for part in at_blocks[0]}

    def _memory_at(self, block: str, features: Features) -> dict[str, int]:
        """Return the bytes of each part of the memory at one block."""
        request, settings, rule = self.request, self.request.settings, self.rule
        groups = self.groups(block)
        turns = [*rule.turns(groups)] or [[]]
        solved, held, batches = self._dealt()
        sides = 1 + self.runs_experts
        waiting = sides * features.numbers(solved + held, batches) + features.numbers(held, 0)
        noted = [0] * len(turns)  # numbers that wait for later turns, by turn
        for index, turn in enumerate(turns[1:], start=1):
            for group in (group for group in turn if not is_encoded(group)):
                numbers = sum(group.outputs) if group.has_few_outputs else inputs_of(group)
                noted[index] += solved * features.positions * numbers
        inputs = [inputs_of(group) for group in groups]
        rows = features.positions * min(settings.batch_size, max(self.samples))
        dtype = rule.dtype(request.tasks, request.device)
        at_once = settings.sums_at_once, request.device
        by_turn = []  # features that wait, and sums
        for index, turn in enumerate(turns):
            sizes = [sums_of(group, self.model, rule, dtype) for group in turn]
            sums = max(sum(sizes[part]) for part in divided(sizes, *at_once))
            by_turn.append((self.itemsize * (waiting + sum(noted[max(index, 1) :])), sums))
        widest = max((group.inputs for group in groups if group.kind == "linear"), default=0)
        needed = tensors_of_block(self.model, self.family, block)
        tensors = self.model.state_dict(keep_vars=True)
        read = size_of(tensors[name] for name in needed)
        new = [self.model.get_parameter(n) for group in groups for n in group.parameters]
        return {
            "features": max(stored for stored, _ in by_turn),
            "batch": self.itemsize * rows * (sides * sum(inputs) + 2 * max(inputs, default=0)),
            "sums": max(sums for _, sums in by_turn),
            "together": max(map(sum, by_turn)),
            "solve": SYSTEMS * 8 * widest**2,
            "block": read + 2 * dtype.itemsize * sum(parameter.numel() for parameter in new),
        }

    def groups(self, block: str) -> list[Group]:
        """Return the groups of a block's modules."""
        rule = self.rule
        sites: list[Any] = list(self.modules[block].sites)
        sites = [site for site in sites if site.kind != "norm" or rule.calibrate_norm]
        hidden = torch.empty(1, 2, 1, device="meta")
        closes = (
            rule.reads_closing_rows
            and block == self.stages[-1][-1]
            and self.family.closing_rows(self.model, hidden) is not None
        )
        return groups_by_name(self.model, sites, queries_apart=closes)

    def _dealt(self) -> tuple[int, int, int]:
        """Return samples and copies, held-out samples, and batches of the busiest process."""
        settings = self.request.settings
        images = torch.empty(1, 3, 1, 1, device="meta") if takes_images(self.model) else None
        solved = held = batches = 0
        for samples in self.samples:
            apart = min(number_held_out(samples, settings.held_out), samples - 1)
            copies = 1 + number_of_copies(samples - apart, settings.augment, images)
            solved, held = solved + (samples - apart) * copies, held + apart
            batches += math.ceil((samples - apart) / settings.batch_size) * copies + (apart > 0)
        solved, held, batches = (math.ceil(n * self.request.share) for n in (solved, held, batches))
        return solved, held, batches


def is_encoded(group: Group) -> bool:
    """Return whether a group receives an encoder's features, which are stored with the batch."""
    owner, _, leaf = group.name.rpartition(".")
    return leaf.startswith(("k", "v")) and any(part in owner for part in CROSS)


def inputs_of(group: Group) -> int:
    """Return the number of a group's inputs at one position."""
    patches = group.sites[0].patches
    return group.inputs if patches is None else patches.channels


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
