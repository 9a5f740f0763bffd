"""Merging block by block in closed form: RegMean, RegMean++ and LOT as rules of the block loop."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from fusion_bench_featcal.core import frobenius_norm
from fusion_bench_featcal.core.kernels import TORCH
from fusion_bench_featcal.core.moments import moment_dtype, weight_of_norm
from fusion_bench_featcal.core.products import mirror_lower
from fusion_bench_featcal.engine.family_check import checked_family
from fusion_bench_featcal.engine.log import CalibrationLog, Reporter
from fusion_bench_featcal.engine.loop import BlockLoop
from fusion_bench_featcal.engine.problem import Autocast, Modes, Problem, device_of
from fusion_bench_featcal.engine.processes import Processes
from fusion_bench_featcal.engine.recording import Recorder, Recording
from fusion_bench_featcal.engine.rules import Rule, Streams, Turn
from fusion_bench_featcal.engine.samples import Batch, check_inputs, take_samples
from fusion_bench_featcal.engine.setup import set_up
from fusion_bench_featcal.engine.task_sums import TaskSums
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, names_under
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.methods.least_squares import GainMean, LinearMean, shrink_off_diagonal
from fusion_bench_featcal.methods.outside import load_outside
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.setting_checks import BOOLEAN, POSITIVE, SHARE, Check, one_of, problems_of
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

log = logging.getLogger(__name__)


Samples = Callable[[], Mapping[str, Iterator[Batch]]]
"""Begins every task's batches anew."""


class BlockMethod(Protocol):
    """A merger that goes through the blocks in forward order, with its settings.

    Attributes:
        weighs_gains: Whether it solves LayerNorms' gains.
    """

    @property
    def weighs_gains(self) -> bool:
        """As the attribute."""
        ...

    def start(self, problem: Problem, base: nn.Module, samples: Samples) -> None:
        """Give the model, which has the base's values, those that it has before the first block."""
        ...

    def rule(self, problem: Problem, base: nn.Module) -> Rule:
        """The rule of the block loop."""
        ...


@dataclass(frozen=True, kw_only=True)
class LeastSquares:
    """Choices that tell one closed-form merger from another; those of the three follow below.

    Attributes:
        stream: Whose hidden features each expert's block receives: those of the `expert` itself,
            or those of the `merged` blocks before it.
        anchor: The weight that input directions without energy keep: the experts' `mean`, or the
            `base`.
        off_diagonal: Factor of the Gram matrices' entries off the diagonal (RegMean's `a`), 0 to 1.
        task_weights: `equal` (the papers'), or `unit_gram`: Gram matrices scaled as FeatCal does.
        weighs_gains: Whether a LayerNorm's gain is weighted by each channel's energy; else it is
            the experts' mean, as biases, shifts and everything outside the blocks are.
        scale: Factor of every step from the base (LOT's lambda), > 0; other than 1 with the anchor
            `base` only.
        cutoff: Input directions with less than this share of the largest energy, of channels
            brought to size 1, count as unseen, 0 to 1.
        outside: Whether linear layers, convolutions and LayerNorms outside the blocks are solved,
            too; for image models.
    """

    stream: Literal["expert", "merged"]
    anchor: Literal["mean", "base"]
    off_diagonal: float = 0.95
    task_weights: str = "equal"
    weighs_gains: bool = False
    scale: float = 1.0
    cutoff: float = 0.0
    outside: bool = False

    checks: ClassVar[dict[str, Check]] = {
        "off_diagonal": SHARE,
        "cutoff": SHARE,
        "scale": POSITIVE,
        "outside": BOOLEAN,
        "task_weights": one_of(("equal", "unit_gram")),
    }

    def __post_init__(self) -> None:
        if problems := problems_of(self, self.checks):
            raise ValueError("; ".join(f"method.{problem}" for problem in problems))
        from_base = self.anchor == "base" and self.off_diagonal == 1
        if not from_base and (self.scale != 1 or self.outside):
            raise ValueError(
                "method.scale and method.outside are for steps from the base without shrinkage "
                "(LOT): leave them out"
            )

    def start(self, problem: Problem, base: nn.Module, samples: Samples) -> None:
        """Give the model what does not depend on its blocks' inputs."""
        _load_means(problem.model, problem.experts, self.scale)
        if self.outside:
            load_outside(problem, base, samples(), self.linear_mean, self.gain_mean)

    def rule(self, problem: Problem, base: nn.Module) -> "LeastSquaresRule":
        """The rule of the block loop."""
        return LeastSquaresRule(problem, self, base)

    def linear_mean(self, anchor: Tensor) -> LinearMean:
        """Sums over the experts for a weight, given what unseen input directions keep."""
        floor = 1 - self.off_diagonal
        return LinearMean(anchor, floor=floor, cutoff=self.cutoff, scale=self.scale)

    def gain_mean(self, anchor: Tensor) -> GainMean:
        """Sums over the experts for a LayerNorm's gain."""
        return GainMean(anchor, scale=self.scale)


# Jin et al., ICLR 2023: `W = (sum_i W_i G_i) (sum_i G_i)^-1` with `G_i` the mean Gram matrix of
# expert i's own inputs, shrunk off its diagonal. In input directions that no sample has, where the
# formula has no value, the experts' mean stays.
REGMEAN = LeastSquares(stream="expert", anchor="mean")

# Nguyen et al., TMLR 2026: each expert's block runs on the output of the merged blocks before it.
# FusionBench's version keeps the base's values behind the last block, this one the experts' mean.
REGMEAN_PLUSPLUS = LeastSquares(stream="merged", anchor="mean")

# Sun et al., NeurIPS 2025 (arXiv 2505.23859): with task vectors `T_i = W_i - W_0` and Gram matrices
# `G_i` of expert i's own inputs (Algorithm 1) a linear weight is
# `W_0 + lambda (sum_i T_i G_i) (sum_i G_i)^+`: RegMean without shrinkage, but directions that no
# sample has stay at the base. Lambda is 1.2 for ViT-B/32, 1.5 for ViT-L/14 (6.3). Where the
# pseudo-inverse takes an energy for none is open; directions of almost none get steps of many times
# the weight, and the cut-off is ours. The paper uses 16 to 64 samples a task.
LOT = LeastSquares(
    stream="expert",
    anchor="base",
    off_diagonal=1.0,
    weighs_gains=True,
    scale=1.2,
    cutoff=1e-3,
)


@torch.inference_mode(False)  # hooks tell tensors apart by version, which inference mode lacks
@torch.no_grad()
def merge_blockwise(
    base: nn.Module,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    method: BlockMethod,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
) -> nn.Module:
    """Merge experts block by block in forward order.

    Args:
        base: The base model, which gives structure, dtype and device. It is not changed.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, as `calibrate` takes them.
        settings: `samples_per_task`, `modules`, `family` and, for `unit_gram`, `eps` are used.
        method: `REGMEAN`, `REGMEAN_PLUSPLUS`, `LOT`, one of those with other choices, or
            `ProDistilling`.
        device: Where to compute; None: where the base is.
        autocast: Makes the context for forward passes; statistics are never inside it.
        progress: Whether to show a progress bar.

    Returns:
        The merged model.

    Raises:
        CalibrationError: If the run cannot go on; the message names the place and the setting.
        ValueError: If the family is unknown.
    """
    settings = settings.replace(
        calibrate_norm=method.weighs_gains, anchor_rho=1.0, sums_precision="auto"
    )
    check_inputs(base, experts, batches, settings)
    family, batches = checked_family(
        resolve_family(settings.family, base), settings.family, base, batches, experts, Processes()
    )
    shown, home = family.view.shown(base), device_of(base)
    device = torch.device(device or home)
    problem, reads = set_up(
        shown,
        None,
        experts,
        settings,
        family,
        device=device,
        autocast=autocast or nullcontext,
        kernel=TORCH,
    )
    visits = len(problem.modules) * len(experts)
    reporter = Reporter(
        CalibrationLog(family=family.name),
        progress_bar(total=visits, unit="visit", show=progress),
        Processes(),
        name="merging",
    )

    def samples() -> dict[str, Iterator[Batch]]:
        return {task: take_samples(task, batches[task], settings, shown) for task in experts}

    with torch.autocast(device.type, enabled=False), reporter.progress:
        method.start(problem, shown, samples)
        BlockLoop(problem, method.rule(problem, shown), reads, reporter).run(samples())
    Modes.of(shown).restore(problem.model)
    return family.view.restored(problem.model).to(home)


def _load_means(model: nn.Module, experts: Mapping[str, ExpertModel], scale: float) -> None:
    """Give every floating tensor the experts' mean; one of each is in memory at a time.

    A parameter's step from the model, which has the base's values, is multiplied by `scale`;
    buffers, such as running variances, stay means.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            wide = moment_dtype(tensor.dtype)
            total = sum((expert.tensor(name).to(wide) for expert in experts.values()), start=0)
            mean = total / len(experts)
            scaled = scale != 1 and name in parameters
            tensor.copy_(tensor + scale * (mean - tensor) if scaled else mean)


def _refuse_groups(problem: Problem) -> None:
    """Refuse convolutions with several groups, each of which is a linear map of its own."""
    for modules in problem.modules.values():
        for site in modules.sites:
            if site.groups > 1:
                raise CalibrationError(
                    f"module {site.name} is a convolution with {site.groups} groups, which only "
                    f"method=featcal calibrates. Exclude it: method.modules=['!{site.name}']"
                )


class LeastSquaresRule(Rule):
    """Sums the inputs of each expert's block, from which its outputs are reproduced best."""

    shows_drift_before = False

    def __init__(self, problem: Problem, method: LeastSquares, base: nn.Module) -> None:
        """Apply a method to a problem.

        Args:
            problem: The problem, whose model has the experts' means.
            method: The method.
            base: The base model.

        Raises:
            CalibrationError: If a module is a convolution with several groups.
        """
        _refuse_groups(problem)
        self._problem, self._method, self._base = problem, method, base
        self._recorder = Recorder()
        self.runs_model = method.stream == "merged"
        self.runs_experts = not self.runs_model

    def visits(self, block: str) -> dict[str, list[str]]:
        """All that the block needs, or, behind merged blocks, its own."""
        if self.runs_experts:
            return {block: self._problem.tensors_of(block)}
        return {block: names_under(self._problem.model.state_dict(), [block])}

    def turns(self, block: str, streams: Streams) -> Iterable[Turn]:
        """One, with all modules."""
        return [Turn(block, block, self.visits(block)[block])]

    def opened(self, task: str, names: Sequence[str]) -> AbstractContextManager[nn.Module]:
        """The expert, or the merged model with the expert's block."""
        expert = self._problem.experts[task]
        if self.runs_experts:
            return expert.loaded(names)
        return _grafted(self._problem.model, expert, names)

    def task_sums(self, task: str, turn: Turn, expert: nn.Module) -> TaskSums:
        """Sums of the expert's inputs."""
        sites = self._problem.modules[turn.block].sites
        return TaskSums(turn.block, task, sites, demo_weights=False)

    def record(
        self, turn: Turn, expert: nn.Module, batch: Batch
    ) -> tuple[Recording, Recording | None]:
        """Run the expert's block alone: its inputs are what is summed."""
        return self.follow(turn.block, expert, batch), None

    def follow(self, block: str, expert: nn.Module, batch: Batch) -> Recording:
        """Run the expert's block on the features that the method names."""
        names = [site.name for site in self._problem.modules[block].sites]
        call = batch.cal if self.runs_model else batch.exp
        recording = self._recorder.record(
            expert, names, lambda: self._problem.step(expert, block, call)
        )
        if self.runs_experts:
            batch.exp = recording.following
        return recording

    def block_sums(self, turn: Turn) -> "LeastSquaresSums":
        """Sums over the experts."""
        return LeastSquaresSums(self._problem, self._method, self._base, turn.block)


class LeastSquaresSums:
    """Running sums of one block over experts, and the parameters solved from them."""

    def __init__(self, problem: Problem, method: LeastSquares, base: nn.Module, block: str) -> None:
        """Start with no expert.

        Args:
            problem: The problem, whose model still has the experts' means in this block.
            method: The method.
            base: The base model.
            block: The block.
        """
        self._method, self._eps = method, problem.settings.eps
        self._sites = {site.name: site for site in problem.modules[block].sites}
        source = problem.model if method.anchor == "mean" else base
        self._linear: dict[str, LinearMean] = {}
        self._gains: dict[str, GainMean] = {}
        for name, site in self._sites.items():
            parameter = source.get_parameter(site.weight_name).detach().to(problem.device)
            anchor = site.oriented(parameter)
            if site.kind == "norm":
                self._gains[name] = method.gain_mean(anchor)
            else:
                self._linear[name] = method.linear_mean(anchor)

    def add(self, sums: TaskSums, expert: nn.Module) -> None:
        """Add one expert's sums, which are used up.

        Raises:
            CalibrationError: If they are empty or not finite.
        """
        sums.check()
        for names, linear in sums.linear.items():
            gram = self._gram(mirror_lower(linear.means().gram))
            for name in names:
                site = self._sites[name]
                weight = site.oriented(expert.get_parameter(site.weight_name))
                self._linear[name].add(gram, weight)
        for name, norm in sums.norm.items():
            gain = expert.get_parameter(self._sites[name].weight_name)
            self._gains[name].add(norm.sum_z_sq / norm.weight, gain)

    def _gram(self, mean_gram: Tensor) -> Tensor:
        """The mean gram, shrunk and weighted by the method."""
        gram = shrink_off_diagonal(mean_gram, self._method.off_diagonal)
        if self._method.task_weights == "equal":
            return gram
        return gram * weight_of_norm(frobenius_norm(mean_gram), self._eps)

    def solve(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """New parameters by name; nothing is logged of them."""
        updates: dict[str, Tensor] = {}
        for name, mean in self._linear.items():
            weight, seen = mean.solve()
            log.debug("%s: %d of %d input directions were seen", name, seen, weight.shape[1])
            updates[self._sites[name].weight_name] = self._sites[name].oriented(weight)
        gains = {self._sites[name].weight_name: mean.solve() for name, mean in self._gains.items()}
        return updates | gains, []


@contextmanager
def _grafted(model: nn.Module, expert: ExpertModel, names: Sequence[str]) -> Iterator[nn.Module]:
    """The model with some of an expert's tensors in place of its own, which come back after."""
    tensors = model.state_dict()
    own = {name: tensors[name].clone() for name in names}
    try:
        for name in names:
            tensors[name].copy_(expert.tensor(name))
        yield model
    finally:
        for name, tensor in own.items():
            tensors[name].copy_(tensor)
