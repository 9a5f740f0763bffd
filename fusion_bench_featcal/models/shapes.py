"""Estimates of a calibration from a model's shapes: bytes to read, operations, memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import bytes_text
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.families.base import stages_of
from fusion_bench_featcal.modules.sites import find_all_modules

_SUMS = 4  # bytes of an entry of a sum, in float32
_TARGETS = 8  # tokens that a decoder writes in an estimate


@dataclass
class Group:
    """Modules of a block that receive the same input.

    Attributes:
        rows: Input vectors of one sample.
        width: Their length.
        outputs: Outputs of all modules together.
    """

    rows: int
    width: int
    outputs: int

    def moments(self, samples: int) -> float:
        """Return the operations of one side's Gram and cross moments of some samples."""
        rows = samples * self.rows
        return rows * self.width**2 + 2 * rows * self.width * min(self.width, self.outputs)

    @property
    def solve(self) -> float:
        """Operations of a Cholesky factor and its solves."""
        return self.width**3 / 3 + 2 * self.width**2 * self.outputs

    @property
    def sums(self) -> int:
        """Bytes of the Gram matrix and the right side, over tasks and of one task."""
        return 2 * _SUMS * self.width * (self.width + self.outputs)


@dataclass
class Shapes:
    """A model of transformers, as one sample runs through it.

    Attributes:
        parameters: Number of parameters.
        block_bytes: Bytes of the largest block.
        bytes: Bytes of all tensors.
        passes: Block -> operations of one sample's pass.
        groups: Block -> its groups.
        feature_bytes: Bytes of one sample's features between two blocks, at most.
    """

    parameters: int
    block_bytes: int
    bytes: int
    passes: dict[str, float] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    feature_bytes: int = 0

    def estimate(self, *, tasks: int, samples: int, plus: bool) -> "Estimate":
        """Return the amounts of a calibration by the paper's rule or by FeatCal+."""
        rows, groups = tasks * samples, [g for of_block in self.groups.values() for g in of_block]
        turns = max(map(len, self.groups.values())) if plus else 1
        # The expert once, the merged model once a turn and once with its new weights.
        passes = rows * sum(self.passes.values()) * (2 + turns)
        blocks = self.groups.values()
        at_once = max if plus else sum  # of the groups of a block
        sums = [at_once(group.sums for group in block) for block in blocks if block]
        inputs = max(sum(group.rows * group.width for group in block) for block in blocks)
        size = self.bytes // self.parameters
        return Estimate(
            read=self.bytes * (tasks + 1 + plus),
            passes=passes,
            moments=sum(g.moments(rows) for g in groups) * (2 if plus else 1),
            solves=sum(g.solve for g in groups),
            features=rows * (2 * self.feature_bytes + inputs * size),
            sums=max(sums, default=0) * (2 if plus else 1),
            weights=2 * self.block_bytes,
        )


@dataclass(frozen=True)
class Estimate:
    """Amounts of one calibration.

    Attributes:
        read: Bytes of the merged model, the experts and, for FeatCal+, the base.
        passes: Floating-point operations of forward passes.
        moments: Those of sums over the samples.
        solves: Those of solves, which every process repeats.
        features: Bytes of all samples' features, and of the expert's inputs in a block.
        sums: Bytes of the sums of a block, of FeatCal+ of its largest group.
        weights: Bytes of the weights of one block of the model and of one expert.
    """

    read: int
    passes: float
    moments: float
    solves: float
    features: int
    sums: int
    weights: int

    def as_dict(self) -> dict[str, float]:
        """Return plain values for JSON."""
        return asdict(self)


def shapes_of(folder: str | Path, *, tokens: int) -> Shapes:
    """Run one sample through a model without weights.

    Args:
        folder: A folder with a config.json, which has architectures, or such a file.
        tokens: Tokens of a text. Images have the size that the config names.

    Raises:
        CalibrationError: If the model cannot be made from its config, or does not run.
    """
    from transformers import AutoConfig

    from fusion_bench_featcal.models.model_files import ModelFiles

    path = Path(folder).expanduser()
    path = path.parent if path.name == "config.json" else path
    kind: Any = ModelFiles(path, f"--shapes {folder}").calibrated_class
    # Products of attention are counted only if they are products of matrices.
    eager: Any = {"attn_implementation": "eager"}
    config: Any = AutoConfig.from_pretrained(path, trust_remote_code=False, **eager)
    config = getattr(config, "vision_config", config)
    dtype = getattr(config, "dtype", None)
    with FakeTensorMode(), _dtype(dtype if isinstance(dtype, torch.dtype) else torch.float32):
        try:
            return _run(kind(config).eval(), config, tokens)
        except CalibrationError:
            raise
        except Exception as error:  # any error of the class about its config's values
            raise CalibrationError(f"--shapes {folder}: {kind.__name__}: {error}") from error


def _run(model: Any, config: Any, tokens: int) -> Shapes:
    """Return the shapes of a model, by a pass of one sample."""
    stages = stages_of(resolve_family("auto", model), model)
    modules = find_all_modules(model, stages, None, calibrate_norm=False)
    inputs = dict[str, Tensor]()

    def note(name: str) -> Any:
        return lambda _, args: inputs.__setitem__(name, args[0])

    for block in modules.values():
        for site in block.sites:
            model.get_submodule(site.name).register_forward_pre_hook(note(site.name))
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        model(**_sample(model, config, tokens))
    counts = counter.get_flop_counts()
    tensors = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
    shapes = Shapes(
        parameters=sum(p.numel() for p in model.parameters()),
        block_bytes=max(
            sum(p.nbytes for p in model.get_submodule(block).parameters()) for block in modules
        ),
        bytes=sum(t.nbytes for t in tensors),
    )
    for name, block in modules.items():
        shapes.passes[name] = sum(counts[f"{type(model).__name__}.{name}"].values())
        linear = {site.name: site for site in block.sites if site.kind == "linear"}
        called = [linear[site] for site in inputs if site in linear]
        shared = groupby(called, key=lambda site: id(inputs[site.name]))
        shapes.groups[name] = [_group(model, [*group], inputs) for _, group in shared]
        if called:
            entering = inputs[called[0].name]
            shapes.feature_bytes = max(shapes.feature_bytes, entering.nbytes)
    return shapes


def _group(model: nn.Module, sites: list[Any], inputs: dict[str, Tensor]) -> Group:
    weights = [model.get_parameter(site.weight_name) for site in sites]
    x = inputs[sites[0].name]
    if sites[0].patches is not None:
        raise CalibrationError(f"{sites[0].name} is a convolution, which is not estimated")
    return Group(x.numel() // x.shape[-1], x.shape[-1], sum(w.numel() for w in weights)
                 // x.shape[-1])  # fmt: skip


def _sample(model: Any, config: Any, tokens: int) -> dict[str, Tensor]:
    """Return one text of a number of tokens, or one image."""
    if model.main_input_name == "pixel_values":
        size, channels = config.image_size, getattr(config, "num_channels", 3)
        sides = size if isinstance(size, list | tuple) else (size, size)
        return {"pixel_values": torch.zeros(1, channels, *sides)}
    ids = torch.zeros(1, tokens, dtype=torch.long)
    sample = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(config, "is_encoder_decoder", False):
        sample["decoder_input_ids"] = ids[:, :_TARGETS]
    return sample


@contextlib.contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def show_shapes(shapes: Shapes, estimates: dict[str, Estimate], console: Any = None) -> None:
    """Print estimates by rule as a table, by default on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(f"{shapes.parameters / 1e9:.3g} billion parameters", *estimates)
    for column in table.columns[1:]:
        column.justify = "right"
    rows = {
        "read": "read", "passes": "forward passes", "moments": "sums over samples",
        "solves": "solves", "features": "features of the samples",
        "sums": "sums of a block", "weights": "a block of model and expert",
    }  # fmt: skip
    counts = {"passes", "moments", "solves"}
    for key, label in rows.items():
        values = [getattr(estimate, key) for estimate in estimates.values()]
        show: Any = (lambda v: f"{v / 1e12:.3g} TFLOP") if key in counts else bytes_text
        table.add_row(label, *map(show, values))
    (console or Console()).print(table)
