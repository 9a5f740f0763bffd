"""Reads and memory of a calibration, computed from names and shapes."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core.moments import MOST_ROWS
from fusion_bench_featcal.experts.reads import grants
from fusion_bench_featcal.families import Family, resolve_family
from fusion_bench_featcal.families.transformers_names import CROSS_ATTENTIONS
from fusion_bench_featcal.feature_shapes import (
    LENGTH,
    Features,
    features_of,
    image_numbers,
    takes_images,
)
from fusion_bench_featcal.memory import divided
from fusion_bench_featcal.modules.groups import Group, groups_by_name
from fusion_bench_featcal.modules.models import (
    names_in_order,
    tensors_before_stage,
    tensors_of_block,
)
from fusion_bench_featcal.modules.sites import BlockModules, find_all_modules
from fusion_bench_featcal.rules import Rule, rule_of
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.streams.samples import number_held_out, number_of_copies
from fusion_bench_featcal.streams.task_rows import empty_rows, sums_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Request:
    """A calibration to plan."""

    model: nn.Module  # structure of the merged model, on the meta device
    settings: FeatCalSettings
    tasks: int
    length: int | None = LENGTH  # tokens of a text, or an image's side if it is not in the config
    target_length: int = 8  # tokens of an encoder-decoder's target
    samples: Sequence[int] = ()  # per task, by default `samples_per_task`
    whole: int = 0  # experts and bases that are loaded whole
    loaded: int = 0  # models already in this process's memory, with the merged one
    streamed: bool = False  # the merged model is read, and the result written, block by block
    itemsize: int | None = None  # bytes per number in files, by default as in the model
    fetches: int = 0  # models that must be fetched from the hub
    device: torch.device = CPU
    processes: int = 1
    out: Path | None = None  # folder in which the model is saved next to its finished blocks
    saved: int = 0  # bytes that are written there

    @property
    def share(self) -> float:
        """Return the busiest process's share of the tasks."""
        return math.ceil(self.tasks / self.processes) / self.tasks

    @property
    def storage(self) -> str:
        """Return the storage of features: `device`, `host` (next to a GPU) or `disk`."""
        chosen = self.settings.activations
        is_elsewhere = chosen == "disk" or (chosen == "host" and self.device.type != "cpu")
        return chosen if is_elsewhere else "device"


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
        model = family.view.arranged(request.model)
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

    def memory(self) -> Counter[str]:
        """Return the bytes of each component of the memory, at the block with the largest total.

        `busy` is the peak in a block, `begin` the peak before the first block, including features
        stored on the device.
        """
        lengths = self.request.length, self.request.target_length
        received = features_of(self.family, self.model, self.stages, *lengths)
        memory, tensors = Counter[str](), self.model.state_dict(keep_vars=True)
        for block in self.modules:
            memory |= self._memory_at(block, received[block])
        names = tensors_before_stage(self.model, self.family, self.stages, 0)
        memory["outside"] = size_of(tensors[name] for name in names)
        images = sum(self._dealt()[:2]) * image_numbers(self.model, self.request.length)
        on_device = self.request.storage == "device"
        memory["begin"] = 4 * images + memory["outside"] + on_device * memory["features"]
        return memory

    def _memory_at(self, block: str, features: Features) -> Counter[str]:
        """Return the bytes of each part of the memory at one block."""
        solved, held_out, batches = self._dealt()
        sides, tensors = 1 + self.runs_experts, self.model.state_dict(keep_vars=True)
        waiting = sides * features.numbers(solved + held_out, batches) + features.numbers(
            held_out, 0
        )
        names = tensors_of_block(self.model, self.family, block)
        read, new = size_of(tensors[name] for name in names), 0
        samples = min(self.request.settings.batch_size, max(self.samples))
        rows, divisions = samples * features.positions, self._divisions(block)
        noted = [sum(group.noted for group in part) for part in divisions]
        memory = Counter(block=sides * read)
        for index, part in enumerate(divisions):
            later = solved * features.positions * sum(noted[max(index, 1) :])
            stored = self.itemsize * (waiting + later)
            inputs = rows * (sum(g.received for g in part) + sum(noted) * (index == 0))
            # Inputs of recorded modules, and three copies of the widest module's features.
            passing = max([samples * features.shared, *(g.passing(rows) for g in part)])
            batch = self.itemsize * (inputs + 3 * passing)
            sums, of_task = sum(g.sums for g in part), sum(g.rows for g in part)
            weights, new_parameters = sum(g.weights for g in part), sum(g.new for g in part)
            solve = max((g.solving for g in part), default=0)
            adding = max((g.adding for g in part), default=0)
            expert = new_parameters if index else (sides - 1) * read
            most = max(expert + of_task + max(batch, adding), new_parameters + solve)
            most += read + new + sums + weights
            most += stored * (self.request.storage == "device")
            memory |= Counter(features=stored, batch=batch, sums=sums + of_task, solve=solve)
            memory |= Counter(weights=weights + new_parameters, busy=most)
            new += new_parameters
        return memory

    def _divisions(self, block: str) -> list[list["GroupBytes"]]:
        """Return a block's groups in order, as lists that are summed at once."""
        rule, request = self.rule, self.request
        dtype = rule.dtype(request.tasks, request.device)
        divisions: list[list[GroupBytes]] = []
        for turn in rule.turns(self.groups(block)) or [[]]:
            groups = [GroupBytes.of(group, self.model, rule, dtype) for group in turn]
            sizes = [group.sums + group.rows for group in groups]
            cuts = divided(sizes, request.settings.sums_at_once, request.device)
            divisions += [[groups[index] for index in cut] for cut in cuts]
        return divisions

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
        solved = held_out = batches = 0
        for samples in self.samples:
            number_apart = min(number_held_out(samples, settings.held_out), samples - 1)
            copies = 1 + number_of_copies(samples - number_apart, settings.augment, images)
            solved, held_out = solved + (samples - number_apart) * copies, held_out + number_apart
            batches += math.ceil((samples - number_apart) / settings.batch_size) * copies + (
                number_apart > 0
            )
        solved, held_out, batches = (
            math.ceil(n * self.request.share) for n in (solved, held_out, batches)
        )
        return solved, held_out, batches


@dataclass(frozen=True)
class GroupBytes:
    """Bytes of one group of modules while it is summed and solved."""

    sums: int  # over tasks
    rows: int  # sums over the rows of one task
    weights: int  # anchors, the expert's weights, and the drift of all tasks
    adding: int  # matrices formed when a task is added
    solving: int  # matrices formed by the solve
    new: int  # new parameters
    received: int  # numbers at one position of the inputs
    noted: int  # numbers at one position of the expert's stored inputs
    widest: int  # numbers at one position of the widest input or output
    unfolded: int  # numbers at one position of the inputs, unfolded to patches

    @classmethod
    def of(cls, group: Group, model: nn.Module, rule: Rule, dtype: torch.dtype) -> "GroupBytes":
        """Compute them for a group of a model on the meta device."""
        rows = size_of(empty_rows(group, model, model, rule, dtype).tensors())
        sums = sums_of(group, model, rule, dtype) - rows
        new = sum(model.get_parameter(name).nbytes for name in group.parameters)
        received, outputs, is_linear = inputs_of(group), sum(group.outputs), group.kind == "linear"
        item = is_linear * group.maps * max(dtype.itemsize, group.dtype.itemsize)
        gram, weight = item * group.inputs**2, item * group.inputs * outputs
        drift = 0 if group.has_few_outputs else gram  # `sum (x_exp - x) x'`
        adding, solving = 3 * drift, 2 * weight
        if rule.folds > 1:  # sums over all folds, joined by rows from weights, and without one fold
            adding, solving = adding + 2 * gram + drift + 3 * weight, solving + 8 * gram
        weights = (2 + (rule.folds > 1)) * weight + drift  # FeatCal+ keeps base weights
        is_noted = is_linear and rule.runs_experts and not is_encoded(group)
        noted = outputs if rule.notes_outputs and group.has_few_outputs else received
        widest = max(received, *group.outputs)
        return cls(
            sums, rows, weights, adding, solving, new, received, is_noted * noted, widest,
            group.inputs,
        )  # fmt: skip

    def passing(self, rows: int) -> int:
        """Return the size of the widest module's features, or of its patches."""
        return max(rows * self.widest, min(rows, MOST_ROWS) * self.unfolded)


def is_encoded(group: Group) -> bool:
    """Return whether a group receives an encoder's features, which are stored with the batch."""
    owner, _, leaf = group.name.rpartition(".")
    return leaf.startswith(("k", "v")) and any(part in owner for part in CROSS_ATTENTIONS)


def inputs_of(group: Group) -> int:
    """Return the number of a group's inputs at one position."""
    patches = group.sites[0].patches
    return group.inputs if patches is None else patches.channels


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
