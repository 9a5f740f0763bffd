"""State of one calibration."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.checkpoints import Checkpoints, NoCheckpoints
from fusion_bench_featcal.engine.activations import STAY, Activations
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.memory import naming_memory
from fusion_bench_featcal.engine.modules import BlockModules
from fusion_bench_featcal.engine.precision import fold_dtype, row_dtype
from fusion_bench_featcal.engine.processes import OneProcess, Processes
from fusion_bench_featcal.engine.recording import Recorder
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.experts import ExpertModel, names_under
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.reads.ledger import LedgerSource, ReadLedger, stage_place
from fusion_bench_featcal.settings import FeatCalSettings

BASE = "_pretrained_"
"""Name of the base model, as FusionBench's pools have it."""

Autocast = Callable[[], AbstractContextManager[Any]]


@dataclass
class Run:
    """Everything a calibration works with; `model` is the one thing it changes.

    `experts` and the progress bar are those of the tasks that this process works on; `place` says
    what is worked on, `example` is the first batch's inputs without entries.

    Attributes:
        sources: The weights that base and experts read, whose reads are counted.
        kernel: What multiplies float32 matrices on the CPU.
        merges: Whether the merged model is completed on the way; then each place is prepared.
        prepare: Called with every place before its first visit.
    """

    model: nn.Module
    base: ExpertModel | None
    experts: dict[str, ExpertModel]
    sources: dict[str, LedgerSource]
    family: Family
    settings: FeatCalSettings
    kernel: str
    autocast: Autocast
    progress: Any
    log: CalibrationLog
    stages: list[list[str]]
    modules: dict[str, BlockModules]
    shares: Shares
    processes: Processes = field(default_factory=OneProcess)
    checkpoints: Checkpoints | NoCheckpoints = field(default_factory=NoCheckpoints)
    recorder: Recorder = field(default_factory=Recorder)
    reads: ReadLedger = field(default_factory=ReadLedger)
    merges: bool = False
    prepare: Callable[[str], None] | None = None
    activations: Activations = STAY
    place: str = "the start"
    example: Any = None

    @property
    def device(self) -> torch.device:
        """Device of the computation."""
        return device_of(self.model)

    @property
    def row_dtype(self) -> torch.dtype:
        """Least precise dtype of the sums over rows."""
        return row_dtype(self.settings, len(self.shares.tasks), self.device)

    @property
    def fold_dtype(self) -> torch.dtype:
        """Least precise dtype of what is formed from these sums."""
        return fold_dtype(self.settings, len(self.shares.tasks), self.device)

    def enter(self, place: str) -> None:
        """Come to a block, or to what comes before a stage's blocks."""
        self.reads.place = place
        if self.prepare is not None:
            self.prepare(place)

    @property
    def places(self) -> list[str]:
        """All places in order."""
        return [
            place
            for index, stage in enumerate(self.stages)
            for place in (stage_place(index), *stage)
        ]

    def needed_at(self, place: str) -> list[str]:
        """Names of the expert's tensors that a place's visits need."""
        if place in self.modules:
            return self.needed_by(place)
        index = self.places_of_stages[place]
        return self.leading_to(index) if self.uses_expert_features else []

    @property
    def places_of_stages(self) -> dict[str, int]:
        """Place before a stage's blocks -> the stage."""
        return {stage_place(index): index for index in range(len(self.stages))}

    def merged_at(self) -> dict[str, list[str]]:
        """Place -> names of the tensors that are merged there: every one, and tied ones once."""
        tensors = self.model.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(tensors.items())}
        names = [name for name, tensor in tensors.items() if first[id(tensor)] == name]
        blocks = {block: names_under(names, [block]) for block in self.modules}
        inside = {name for found in blocks.values() for name in found}
        return {stage_place(0): [name for name in names if name not in inside], **blocks}

    def at(self, place: str) -> None:
        """Say what is worked on now: to who watches, and to messages."""
        self.place = self.processes.doing = place
        self.progress.set_description(f"FeatCal {place}")

    @property
    def uses_expert_features(self) -> bool:
        """Return whether experts run; a target without their share needs only their weights."""
        return self.settings.mix_alpha > 0 or self.settings.log_drift

    def needed_by(self, block: str) -> list[str]:
        """Names of the expert's tensors that one block's visit needs: all where it runs."""
        if not self.uses_expert_features:
            return self.calibrated_in(block)
        return needed_by(self.model, self.family, block)

    def calibrated_in(self, block: str) -> list[str]:
        """Names of a block's parameters that get new values."""
        return [
            name
            for site in self.modules[block].sites
            for name in site.names
            if site.kind == "norm" or name == site.weight_name or self.settings.calibrate_bias
        ]

    @property
    def hands_on(self) -> bool:
        """Return whether a stage begins from what the one before it ended with."""
        return hands_on(self.family)

    def leading_to(self, stage_index: int) -> list[str]:
        """Names of the expert's tensors that lead to a stage, from the one before where it can."""
        return leading_to(
            self.model, self.family, self.stages, stage_index, after_stages=self.hands_on
        )


def copied(model: nn.Module, device: torch.device, *, in_place: bool = False) -> nn.Module:
    """The model that will be calibrated, on its device: a copy of the merged one, or itself.

    Raises:
        CalibrationError: If there is no memory for it.
    """
    advice = (
        "The merged model and a copy of it must fit: merge in a narrower dtype (bfloat16), set "
        "method.stream_experts=true, or choose another device (fabric.accelerator)"
    )
    with naming_memory(device, lambda: "the copy of the merged model", lambda: advice):
        model = model if in_place else copy.deepcopy(model)
        return model.to(device).eval().requires_grad_(False)


def device_of(model: nn.Module) -> torch.device:
    """Device of a model's parameters."""
    return next(model.parameters()).device


def room_of_a_visit(model: nn.Module, modules: Mapping[str, BlockModules]) -> int:
    """Bytes that the largest block may need beside the samples' features, generously.

    The expert's block, anchors, sums, systems and new parameters: twelve times the block.
    """

    def size(block: str) -> int:
        return sum(p.numel() * p.element_size() for p in model.get_submodule(block).parameters())

    return 12 * max(map(size, modules), default=0)


def needed_by(model: nn.Module, family: Family, block: str) -> list[str]:
    """Names of the tensors that running one block needs."""
    names = list(model.state_dict())
    return names if family.whole_model else names_under(names, [block])


def hands_on(family: Family) -> bool:
    """Return whether a family's stages begin from what the one before them ended with."""
    return getattr(family, "hands_on", False)


def leading_to(
    model: nn.Module,
    family: Family,
    stages: list[list[str]],
    stage_index: int,
    *,
    after_stages: bool = False,
) -> list[str]:
    """Names of the tensors that lead to a stage: all but its blocks, later ones, head.

    A family that replays whole models begins without running anything.

    Args:
        model: The model.
        family: Its family.
        stages: The blocks.
        stage_index: The stage.
        after_stages: Whether earlier stages' blocks have been run before.
    """
    if family.whole_model:
        return []
    find_head: Any = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    after = [block for stage in stages[0 if after_stages else stage_index :] for block in stage]
    after += [name for name, module in model.named_modules() if module is head]
    names = list(model.state_dict())
    return sorted(set(names) - set(names_under(names, after)))


@dataclass(frozen=True)
class Modes:
    """Training mode of every sub-module and gradient flag of every parameter of a model."""

    training: list[bool]
    gradients: list[bool]

    @classmethod
    def of(cls, model: nn.Module) -> "Modes":
        """Record a model's modes."""
        gradients = [parameter.requires_grad for parameter in model.parameters()]
        return cls([module.training for module in model.modules()], gradients)

    def restore(self, model: nn.Module) -> None:
        """Give them to a model of the same structure."""
        for module, training in zip(model.modules(), self.training, strict=True):
            module.training = training
        for parameter, needed in zip(model.parameters(), self.gradients, strict=True):
            parameter.requires_grad_(needed)
