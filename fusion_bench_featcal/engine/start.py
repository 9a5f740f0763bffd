"""Everything a calibration works with, brought together before its first block."""

import logging
from collections.abc import Mapping

import torch
from torch import nn

from fusion_bench_featcal.checkpoints import open_checkpoints
from fusion_bench_featcal.core.kernels import agreed_kernel, choose_kernel, with_kernel
from fusion_bench_featcal.engine.activations import open_activations
from fusion_bench_featcal.engine.log import CalibrationLog
from fusion_bench_featcal.engine.modules import find_all_modules
from fusion_bench_featcal.engine.precision import coarse_sums_warning
from fusion_bench_featcal.engine.processes import Processes
from fusion_bench_featcal.engine.run import BASE, Autocast, Run, copied, room_of_a_visit
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.engine.together import begin_sharing
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.families.views import view_of
from fusion_bench_featcal.progress import progress_bar
from fusion_bench_featcal.reads.ledger import LedgerSource, ReadLedger
from fusion_bench_featcal.settings import FeatCalSettings

log = logging.getLogger(__name__)


def start_run(
    shown: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    settings: FeatCalSettings,
    family: Family,
    *,
    device: torch.device,
    autocast: Autocast,
    progress: bool,
    in_place: bool,
    processes: Processes,
) -> Run:
    """Open the folder of checkpoints, agree with other processes, pair weights; read nothing.

    Args:
        shown: The merged model as its family shows it.
        base: As `calibrate` takes it, and so `experts`, `settings`, `autocast`, `progress` and
            `in_place`.
        experts: Experts by task; only those of this process's tasks are asked for.
        settings: Settings.
        family: How the model is cut into blocks.
        device: Where to compute.
        autocast: Makes the context of forward passes.
        progress: Whether to show a progress bar.
        in_place: Whether `shown` itself is calibrated.
        processes: The processes.

    Returns:
        The run.

    Raises:
        CalibrationError: If checkpoints cannot be used, a module cannot be calibrated, weights do
            not fit the model or memory is short.
    """
    shares = Shares(tuple(experts), processes.rank, processes.size)
    checkpoints = open_checkpoints(settings, processes)
    stages = family.stages(shown)
    modules = find_all_modules(shown, stages, settings)
    begin_sharing(processes, shares, settings, stages, shown)
    # Without gradients autocast keeps no copies of weights, which would be stale after an update.
    model = copied(shown, device, in_place=in_place)
    kernel = choose_kernel(checkpoints.kernel() or settings.linear_kernel, device)
    kernel = agreed_kernel(processes.gather(kernel))
    warning = coarse_sums_warning(settings, len(shares.tasks), device)
    if warning and processes.rank == 0:
        log.warning(warning)
    ledger, sources, view = ReadLedger(), dict[str, LedgerSource](), view_of(family)

    def reader(name: str, source: nn.Module | ExpertSource, role: str = "expert") -> ExpertModel:
        sources[name] = LedgerSource(name, view.source(source_of(source)), ledger)
        paired = ExpertModel(name, checkpoints.watched(name, sources[name]), model, role=role)
        configs = config_of(source), config_of(shown)
        check_same_function(name, *configs, settings.ignore_config, role=role)
        return paired

    return Run(
        model=model,
        base=None if base is None else reader(BASE, base, "base model"),
        experts={task: reader(task, experts[task]) for task in shares.mine},
        sources=sources,
        family=family,
        settings=settings,
        kernel=kernel,
        autocast=with_kernel(kernel, autocast),
        progress=progress_bar(
            total=len(modules) * len(shares.mine),
            unit="visit",
            show=progress and processes.rank == 0,
        ),
        log=CalibrationLog(family=family.name),
        stages=stages,
        modules=modules,
        shares=shares,
        processes=processes,
        checkpoints=checkpoints,
        reads=ledger,
        activations=open_activations(
            settings, device, lambda: room_of_a_visit(model, modules), processes.neighbours
        ),
    )
