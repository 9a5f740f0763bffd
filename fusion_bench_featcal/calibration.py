"""FeatCal: repair a merged model block by block in forward order.

Algorithm 1 itself, which this prepares and runs, is `engine.loop.BlockLoop`.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.checkpoints import open_checkpoints
from fusion_bench_featcal.core.float32_products import convolving_as_multiplying
from fusion_bench_featcal.core.kernels import (
    agreed_kernel,
    choose_kernel,
    processor,
    using_kernel,
)
from fusion_bench_featcal.engine.activations import open_activations
from fusion_bench_featcal.engine.augmentation import augmented, change_of
from fusion_bench_featcal.engine.checks import refuse_not_finite
from fusion_bench_featcal.engine.family_check import checked_family
from fusion_bench_featcal.engine.held_out import hold_out
from fusion_bench_featcal.engine.log import CalibrationLog, Reporter
from fusion_bench_featcal.engine.loop import BlockLoop
from fusion_bench_featcal.engine.memory import memory_advice, naming_memory
from fusion_bench_featcal.engine.planned_reads import PlannedReads
from fusion_bench_featcal.engine.plus_rule import rule_of
from fusion_bench_featcal.engine.precision import coarse_sums_warning
from fusion_bench_featcal.engine.problem import (
    Autocast,
    Modes,
    Problem,
    copied,
    device_of,
    is_language_model,
)
from fusion_bench_featcal.engine.processes import Processes, announced
from fusion_bench_featcal.engine.routing import left_experts
from fusion_bench_featcal.engine.samples import check_inputs, take_samples, weighs_by_sensitivity
from fusion_bench_featcal.engine.setup import set_up
from fusion_bench_featcal.engine.team import Shares, team_of
from fusion_bench_featcal.experts import ExpertModel, ExpertSource
from fusion_bench_featcal.experts.merging import FusedMerge, UpstreamMerge
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.trials import Agreement, best_of, changes_of, refuse_behind

log = logging.getLogger(__name__)

MARKS = 4
"""Features that FeatCal+ keeps of an expert's pass through a block, in widths of its features."""


@dataclass(frozen=True)
class CalibrationResult:
    """A calibrated model and what was done to it.

    Attributes:
        model: The calibrated model: class, dtype and device of the merged one.
        log: Records of every block.
        reads: What was planned and what was read, see docs/read_budget.md.
    """

    model: nn.Module
    log: CalibrationLog
    reads: dict[str, Any] = field(default_factory=dict)


@announced
@torch.inference_mode(False)  # hooks tell tensors apart by version, which inference mode lacks
@torch.no_grad()
def calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    family: Any = None,
    *,
    device: torch.device | str | None = None,
    autocast: Autocast | None = None,
    progress: bool = True,
    in_place: bool = False,
    merging: UpstreamMerge | None = None,
    processes: Processes | None = None,
    hashed: bool = False,
) -> CalibrationResult:
    """Calibrate a merged model (Algorithm 1).

    All modules of a block are solved from one snapshot, taken before the block changes; the next
    block sees what the updated block produces.

    Args:
        merged: The merged model. It is not changed (but by `in_place` and `merging`); its hooks,
            if any, go with the copy.
        base: The base model; None needs `anchor_rho` 1, which pulls towards the merged
            parameters.
        experts: Each task's expert: a module, or a source of its weights.
        batches: Each task's unlabeled model inputs, in batches of any size: mappings of keyword
            arguments, tuples of arguments, or single tensors; batch first.
        settings: Settings; `samples_per_task` samples of each task are used, or all where there
            are fewer.
        family: How the model is cut into blocks; None takes `settings.family`.
        device: Where to compute; None: where the merged model is.
        autocast: Makes the context for forward passes (Fabric's `autocast`); statistics are never
            inside it.
        progress: Whether to show a progress bar.
        in_place: Whether the merged model is used up, which saves a copy of it. A run that fails
            then leaves it partly calibrated.
        merging: An upstream merger to run on the way; then `merged` has the weights that it begins
            with, and becomes the merged model.
        processes: The processes that work on this calibration together: all of them call this with
            the same arguments, each on its own device. Each works on its share of the tasks; it
            asks for no other experts and no other samples. None: this process alone.
        hashed: Whether the reads' manifest has digests of all tensors that were read.

    Returns:
        The calibrated model and the log, the same in every process.

    Raises:
        CalibrationError: If the run cannot go on; the message names the place and the setting.
        ValueError: If the family is unknown, rho needs a base that is not there, `in_place` would
            change the base or an expert, or what is asked for does not go together.
    """
    processes = processes or Processes()
    check_inputs(base, experts, batches, settings)
    change_of(settings.augment)
    _check_options(
        merged, base, experts, settings, processes, merging, in_place=in_place, hashed=hashed
    )
    asked = settings.family if family is None else family
    mine = Shares(tuple(experts), processes.rank, processes.size).mine
    family, batches = checked_family(
        resolve_family(asked, merged),
        asked,
        merged,
        batches,
        mine,
        processes,
        needs_closing=not settings.is_paper or settings.held_out != 0,
    )
    text = is_language_model(merged)

    def calibrated(settings: FeatCalSettings, *, again: bool = False) -> CalibrationResult:
        return _calibrate(
            merged,
            base,
            experts,
            batches,
            settings,
            family,
            device=device,
            autocast=autocast,
            progress=progress,
            in_place=in_place,
            merging=None if again else merging,  # by then the merged model is complete
            processes=processes,
            hashed=hashed,
        )

    result = (
        best_of(calibrated, settings, text=text)
        if changes_of(settings, text=text)
        else calibrated(settings.of_one_trial())
    )
    if settings.strict:
        refuse_behind(Agreement.of(result.log), settings)
    return result


def _calibrate(
    merged: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    family: Any,
    *,
    device: torch.device | str | None,
    autocast: Autocast | None,
    progress: bool,
    in_place: bool,
    merging: UpstreamMerge | None,
    processes: Processes,
    hashed: bool,
) -> CalibrationResult:
    """Calibrate once."""
    shown, home = family.view.shown(merged), device_of(merged)
    modes, device = Modes.of(shown), torch.device(device or home)
    shares = Shares(tuple(experts), processes.rank, processes.size)
    team = team_of(processes, shares, settings, shown, family)
    kept = open_checkpoints(settings, processes, hashed=hashed)
    kernel = choose_kernel(kept.kernel() or settings.linear_kernel, device)
    kernel = agreed_kernel(processes.gather(kernel))
    problem, reads = set_up(
        shown,
        base,
        experts,
        settings,
        family,
        device=device,
        autocast=autocast or nullcontext,
        kernel=kernel,
        mine=shares.mine,
        in_place=in_place,
        routed=settings.is_paper,
        watched=kept.watched,
    )
    warning = coarse_sums_warning(settings, len(problem.tasks), device)
    if warning and processes.rank == 0:
        log.warning(warning)
    visits = len(problem.modules) * len(shares.mine)
    bar = progress_bar(total=visits, unit="visit", show=progress and processes.rank == 0)
    reporter = Reporter(CalibrationLog(family=family.name), bar, processes)
    rule = rule_of(problem, team)
    activations = open_activations(
        settings,
        device,
        problem.room_of_a_visit,
        processes.neighbours,
        further=1 if settings.is_paper else MARKS,
    )
    loop = BlockLoop(
        problem,
        rule,
        reads,
        reporter,
        team=team,
        kept=kept,
        activations=activations,
        merged=_merged_beside(problem, shown, merging, in_place=in_place),
    )
    fused = None
    if merging is not None:
        fused = FusedMerge(merging, shown.state_dict(), problem.model, problem.modules, reads)
        reads.on_enter = fused
    short = naming_memory(device, lambda: reporter.place, lambda: memory_advice(settings, device))
    try:
        with (
            torch.autocast(device.type, enabled=False),
            convolving_as_multiplying(),
            using_kernel(kernel),
            bar,
            short,
            activations,
        ):
            if fused is None:
                _check_weights(problem, "the merged model", "Check method.base_method")
            planned = PlannedReads(problem, reads, team, shown.state_dict(), fused)
            reporter.log.add("plan", planned.record())
            reporter.log.add("engine", {"linear_kernel": kernel, "processor": processor()})
            if not settings.is_paper:
                sensitive = weighs_by_sensitivity(settings, problem.model)
                reporter.log.add("rows", {"weights": "sensitivity" if sensitive else "uniform"})
            kept.compare(lambda: _description(shown, problem, kernel, merging))
            samples = {t: take_samples(t, batches[t], settings, shown) for t in shares.mine}
            watched = {t: kept.watched_samples(t, taken) for t, taken in samples.items()}
            dealt = {t: hold_out(t, taken, settings.held_out) for t, taken in watched.items()}
            loop.run({t: augmented(t, all_, settings, team.cut) for t, all_ in dealt.items()})
            _check_weights(problem, "the calibrated model", "Raise method.ridge_lambda")
            left = left_experts(problem.modules, reporter.log)
            if left and processes.rank == 0:
                log.warning(left)
    finally:
        modes.restore(problem.model)
    manifest = planned.manifest(kept.digests() if hashed else None)
    model = family.view.restored(problem.model).to(home)
    return CalibrationResult(model, reporter.log, manifest)


def _merged_beside(
    problem: Problem, shown: nn.Module, merging: UpstreamMerge | None, *, in_place: bool
) -> nn.Module | None:
    """The merged model, for held-out samples, where blocks that have not changed are not enough."""
    family, several = problem.family, len(problem.stages) > 1 and not problem.family.hands_on
    # Statistics change before the paper's rule looks at a block.
    ahead = problem.settings.is_paper and any(m.batch_norms for m in problem.modules.values())
    if problem.settings.held_out == 0 or not (family.whole_model or several or ahead):
        return None
    if merging is not None or in_place:
        raise ValueError(
            f"method.held_out needs the merged model beside the calibrated one with "
            f"method.family={family.name}: set method.fuse_merge=false, or leave out in_place"
        )
    return copied(shown, problem.device)


def _check_weights(problem: Problem, label: str, advice: str) -> None:
    """Refuse NaN and infinity in the model, naming the base or expert that brought them."""
    models = [*([problem.base] if problem.base is not None else []), *problem.experts.values()]

    def reader(source: ExpertModel) -> Callable[[str], object]:
        return lambda name: source.stored(name) if name in source.keys else None

    refuse_not_finite(problem.model, label, advice, map(reader, models))


def _check_options(
    merged: nn.Module,
    base: Any,
    experts: Mapping[str, Any],
    settings: FeatCalSettings,
    processes: Processes,
    merging: UpstreamMerge | None,
    *,
    in_place: bool,
    hashed: bool,
) -> None:
    """Refuse options that do not go together."""
    if in_place and changes_of(settings, text=is_language_model(merged)):
        raise ValueError(
            "in_place uses up the merged model, from which every calibration of method.trials "
            "begins; set one of them off (method.trials=1)"
        )
    if merging is not None and merging.own is not None and settings.expert_read_budget is not None:
        raise ValueError(
            f"merging begins with the weights of {merging.own!r}, which method.expert_read_budget "
            "may leave out: begin with the base's (own=None)"
        )
    if merging is not None and in_place:
        raise ValueError("merging completes the merged model, which in_place would use up")
    if merging is not None and processes.size > 1:
        raise ValueError("merging needs all experts, of which each process reads only its own")
    if in_place and hashed:
        raise ValueError("in_place uses up the merged model, of which hashed takes a digest")
    if in_place and settings.expert_read_budget is not None:
        raise ValueError(
            "in_place uses up the merged weights, which method.expert_read_budget puts in place of "
            "those that are not read; set one of them off"
        )
    if in_place and any(model is merged for model in (base, *experts.values())):
        raise ValueError("in_place needs a merged model that is neither the base nor an expert")


def _description(
    shown: nn.Module, problem: Problem, kernel: str, merging: UpstreamMerge | None
) -> dict[str, Any]:
    """Everything that kept blocks depend on, but for samples and weights that are read later."""
    from fusion_bench_featcal.checkpoints.dependencies import describe_run

    upstream = None if merging is None else merging.description
    return describe_run(shown, problem, kernel, upstream)
