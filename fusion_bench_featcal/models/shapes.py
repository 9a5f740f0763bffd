"""Estimates of a calibration from a model's shapes: bytes to read, operations, memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.experts.empty import sample_of
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import stages_of
from fusion_bench_featcal.models.model_files import ModelFiles
from fusion_bench_featcal.modules.block_modules import find_all_modules
from fusion_bench_featcal.modules.groups import Group, find_groups, group_of, record
from fusion_bench_featcal.modules.mixtures import Mixture
from fusion_bench_featcal.results.tables import Table
from fusion_bench_featcal.rules.plus import RIDGES

FACTORS = len(RIDGES) + 2
"""Cholesky factors of a system of FeatCal+, at most: its ridges, the task vectors, the step."""

_SUMS = 4  # bytes of an entry of a sum, in float32


@dataclass(frozen=True)
class GroupShape:
    """Sizes of modules that receive the same input.

    Attributes:
        rows: Input vectors of one sample.
        width: Their length.
        outputs: Outputs of all modules together.
        experts: Number of routed experts that share the rows and are solved one at a time.
    """

    rows: int
    width: int
    outputs: int
    experts: int = 1

    @property
    def has_few_outputs(self) -> bool:
        """Return whether sums pair inputs with outputs, which are then fewer (`LinearTaskSums`)."""
        return 2 * self.outputs <= self.width

    def moments(self, samples: float) -> float:
        """Return the operations of Gram and cross moments of some samples.

        Each sample is fitted or held out, never both, so both rules need equally many.
        """
        products = 2 * self.outputs if self.has_few_outputs else self.width
        return samples * self.rows * self.width * (self.width + 2 * products)

    def targets(self, *, plus: bool) -> float:
        """Return the operations that complete the sums of one task (`GroupSums.add`)."""
        product = 2 * self.outputs * self.width**2
        # Energies of step and expert, from a triangle each. Rows from the weights, their targets.
        more = product + product / 2 + min(4 * self.outputs**2 * self.width, product)
        return self.experts * ((not self.has_few_outputs) * product + plus * more)

    def solve(self, *, plus: bool) -> float:
        """Return the operations of Cholesky factors, the step, and the product before it."""
        factors = FACTORS if plus else 1
        return self.experts * self.width**2 * (factors * self.width / 3 + 4 * self.outputs)

    def sums(self, *, plus: bool) -> int:
        """Return the bytes of sums over tasks, those of one task, and weights in float32.

        FeatCal+ holds fitted and held-out samples of a task, and task-vector rows. It counts more
        in its solves, which are in float64 for small ridges.
        """
        square, weight = self.width**2, self.width * self.outputs
        cross, drift = (weight, 0) if self.has_few_outputs else (square, square)
        if not plus:
            return _SUMS * (2 * square + drift + cross + 3 * weight)
        collected = 6 * square + drift + 2 * cross + 7 * weight
        return _SUMS * max(collected, 9 * square + 3 * weight, 7 * square + 9 * weight)


@dataclass(frozen=True)
class Shapes:
    """A model of transformers, as one sample runs through it.

    Attributes:
        parameters: Number of parameters.
        block_bytes: Bytes of the largest block.
        bytes: Bytes of all tensors.
        passes: Block -> operations of one sample's pass.
        groups: Block -> its groups.
        routed: Block with a mixture -> its groups of routed experts.
        entering: Numbers of one sample that enter the mixtures of a block, at most.
        feature_bytes: Bytes of one sample's features between two blocks, at most.
    """

    parameters: int
    block_bytes: int
    bytes: int
    passes: Mapping[str, float]
    groups: dict[str, list[GroupShape]]
    routed: dict[str, list[GroupShape]]
    entering: int
    feature_bytes: int

    @property
    def plus_turns(self) -> float:
        """Return how often FeatCal+ runs a block of the calibrated model while inputs are summed.

        It is run once for each group, up to the group's input. Attention is not counted.
        """
        blocks = [[g.rows * g.width * g.outputs for g in block] for block in self.groups.values()]
        return max(sum(accumulate(block[:-1])) / max(sum(block), 1) for block in blocks)

    def estimate(self, *, tasks: int, samples: int, plus: bool, batch: int = 16) -> "Estimate":
        """Return the amounts of a calibration by the paper's rule or by FeatCal+.

        Args:
            tasks: Number of tasks.
            samples: Samples of each task.
            plus: Whether the rule is FeatCal+.
            batch: Samples of a batch.
        """
        rows, blocks = tasks * samples, [*self.groups.values(), *self.routed.values()]
        groups = [group for block in blocks for group in block]
        # The expert once, the merged model in turns, for a mixture's router, and with new weights.
        runs = 2 + (self.plus_turns if plus else 1) + bool(self.routed)
        at_once = max if plus else sum  # of the groups of a block
        sums = [at_once(group.sums(plus=plus) for group in block) for block in blocks if block]
        most_sums = max(sums, default=0)
        inputs = [[g.rows * g.width for g in block] for block in self.groups.values()]
        # FeatCal+ solves the first group at once. The paper's rule uses all before the next batch.
        waiting = max(sum(block[1:]) for block in inputs) if plus else 0
        size, outside = self.bytes // self.parameters, self.bytes - len(inputs) * self.block_bytes
        return Estimate(
            read=self.bytes * (tasks + 1 + plus),
            passes=rows * sum(self.passes.values()) * runs,
            batches=tasks * math.ceil(samples / batch) * len(self.passes) * runs,
            moments=sum(g.moments(rows) for g in groups),
            targets=tasks * sum(g.targets(plus=plus) for g in groups),
            solves=sum(g.solve(plus=plus) for g in groups),
            features=rows * (2 * self.feature_bytes + (waiting + 2 * self.entering) * size),
            # Inputs of model and expert, outputs, and parts in float32.
            batch=4 * batch * max(map(sum, inputs)) * size,
            sums=most_sums,
            # Blocks of the model, of an expert and of the next one. Or, at another time than the
            # sums, embeddings of two models.
            weights=max(3 * self.block_bytes, 2 * outside - most_sums),
            number_bytes=size,
        )


@dataclass(frozen=True)
class Estimate:
    """Amounts of one calibration.

    Attributes:
        read: Bytes of the merged model, the experts and, for FeatCal+, the base.
        passes: Floating-point operations of forward passes.
        batches: Number of runs of a batch through a block.
        moments: Operations of sums over the samples.
        targets: Those of completing the sums of each task.
        solves: Those of solves, which every process repeats.
        features: Bytes of all samples' features, of FeatCal+ also the expert's inputs in a block.
        batch: Bytes of a running batch.
        sums: Bytes of the sums of a block, of FeatCal+ of its largest group, and its solve.
        weights: Bytes of one block of the model, of an expert and of the next one.
        number_bytes: Bytes of a weight.
    """

    read: int
    passes: float
    batches: float
    moments: float
    targets: float
    solves: float
    features: int
    batch: int
    sums: int
    weights: int
    number_bytes: int


@torch.no_grad()
def shapes_of(folder: str | Path, *, tokens: int, option: str = "the model in") -> Shapes:
    """Run one sample through a model without weights.

    Args:
        folder: A folder with a config.json, which has architectures, or such a file.
        tokens: Tokens of a text. Images have the size that the config names.
        option: What names the folder in messages.

    Raises:
        CalibrationError: If the model cannot be made from its config, or does not run.
    """
    path = Path(folder).expanduser()
    path = path.parent if path.name == "config.json" else path
    model: Any = ModelFiles(path, f"{option} {folder}").empty
    # Products of attention are counted only if they are products of matrices.
    model.set_attn_implementation("eager")
    stages = stages_of(resolve_family("auto", model), model)
    modules = find_all_modules(model, stages, None, calibrate_norm=False)
    mixtures = [mixture.name for block in modules.values() for mixture in block.mixtures]
    names = [site.name for block in modules.values() for site in block.sites] + mixtures
    if mixtures:  # the default one needs bfloat16 here, and its products are not counted
        model.set_experts_implementation("batched_mm")
    blocks = map(model.get_submodule, modules)
    sizes = {  # before the tensors are replaced, which unties them
        "parameters": sum(p.numel() for p in model.parameters()),
        "bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "block_bytes": max(sum(p.nbytes for p in block.parameters()) for block in blocks),
    }
    counter = FlopCounterMode(display=False)
    try:
        # Not on the meta device, for which some models have no autocast.
        with FakeTensorMode(allow_non_fake_inputs=True), counter:
            model.to_empty(device="cpu")
            recorded = record(model, names, lambda: model(**sample_of(model, tokens)))
    except CalibrationError:
        raise
    except Exception as error:  # a model may read values, or take other inputs
        kind = type(model).__name__
        raise CalibrationError(f"{option} {folder}: {kind} does not run: {error}") from error
    counts, groups = counter.get_flop_counts(), dict[str, list[GroupShape]]()
    passes = {n: sum(counts[f"{type(model).__name__}.{n}"].values()) for n in modules}
    features, routed = 0, dict[str, list[GroupShape]]()
    for block, block_modules in modules.items():
        all_groups = find_groups(model, block, block_modules.sites, recorded, lambda _: None)
        linear = [group for group in all_groups if group.kind == "linear"]
        groups[block] = [_shape(group, recorded.inputs[group.name]) for group in linear]
        features = max([features, *(recorded.inputs[group.name].nbytes for group in linear[:1])])
        for mixture in block_modules.mixtures:
            rows = recorded.arguments[mixture.name][1].numel()
            routed.setdefault(block, []).extend(_routed(model, mixture, rows))
    return Shapes(
        **sizes,
        passes=passes,
        groups=groups,
        routed=routed,
        entering=max((recorded.inputs[name].numel() for name in mixtures), default=0),
        feature_bytes=features,
    )


def _shape(group: Group, x: Tensor) -> GroupShape:
    if group.convolves:
        raise CalibrationError(f"{group.name} is a convolution, whose cost is not estimated")
    return GroupShape(x.numel() // group.in_features, group.in_features, sum(group.out_features))


def _routed(model: nn.Module, mixture: Mixture, rows: int) -> Iterator[GroupShape]:
    """Yield the shapes of a mixture's two matrices, whose routed experts share the rows."""
    for site in mixture.sites:
        matrix = group_of((site,), lambda name: model.get_parameter(name)[0], site.name)
        yield GroupShape(rows, matrix.in_features, *matrix.out_features, experts=mixture.slots)


def show_shapes(shapes: Shapes, estimates: dict[str, Estimate]) -> None:
    """Print estimates by rule as a table."""
    labels = {
        "read": "read", "passes": "forward passes", "moments": "sums over samples",
        "targets": "targets of the tasks", "solves": "solves",
        "features": "features of the samples", "batch": "a running batch",
        "sums": "sums and solves of a block", "weights": "weights of a block",
    }  # fmt: skip
    counts = {"passes", "moments", "targets", "solves"}
    lines = list[tuple[str, list[str]]]()
    for key, label in labels.items():
        values = [getattr(estimate, key) for estimate in estimates.values()]
        show = (lambda v: f"{v / 1e12:.3g} TFLOP") if key in counts else bytes_text
        lines.append((label, [*map(show, values)]))
    Table(f"{shapes.parameters / 1e9:.3g} billion parameters", [*estimates], lines).show()
