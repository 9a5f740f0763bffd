"""One calibration on a pool: its models opened, its plan logged, its cost measured."""

from collections.abc import Iterable, Mapping
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.calibration import CalibrationResult, calibrate
from fusion_bench_featcal.engine.processes import Processes
from fusion_bench_featcal.experts.merging import UpstreamMerge
from fusion_bench_featcal.fusionbench.plan_run import known_samples, log_plan, stored_itemsize
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, PoolSources, pool_source
from fusion_bench_featcal.results import Cost, measure
from fusion_bench_featcal.settings import FeatCalSettings


def calibrate_pool(
    modelpool: BaseModelPool,
    merged: nn.Module,
    batches: Mapping[str, Iterable[Any]],
    settings: FeatCalSettings,
    *,
    fabric: Any,
    merging: UpstreamMerge | None,
    merges: bool,
    processes: Processes,
) -> tuple[CalibrationResult, Cost]:
    """Calibrate a merged model with a pool's base and experts.

    Args:
        modelpool: The pool.
        merged: The merged model, or the one that `merging` makes it of.
        batches: Batches of every task.
        settings: Settings.
        fabric: Lightning Fabric, with device and precision.
        merging: The upstream merger, where it shares the calibration's reads.
        merges: Whether this run's upstream merger reads the experts, for the plan.
        processes: The processes that calibrate together.

    Returns:
        The calibration and its cost.
    """
    tasks, stream = modelpool.model_names, settings.stream_experts
    exchanged = processes.exchanged_bytes
    with measure() as cost:
        base = None
        if modelpool.has_pretrained:
            base = pool_source(modelpool, BASE_MODEL, stream_experts=stream)
        experts = PoolSources(modelpool, tasks, stream_experts=stream)
        base_held = isinstance(base, nn.Module)
        log_plan(
            merged,
            settings,
            len(tasks),
            fabric.device,
            samples=known_samples(batches),
            held=experts.held(),
            base_held=base_held,
            loaded=1 + base_held,
            itemsize=stored_itemsize(base),
            fused=merging is not None,
            merges=merges,
            processes=processes.size,
            neighbours=processes.neighbours,
        )
        result = calibrate(
            merged,
            base,
            experts,
            batches,
            settings,
            device=fabric.device,
            autocast=fabric.autocast,
            merging=merging,
            processes=processes,
        )
    if processes.size > 1:
        cost.more["processes"] = processes.size
        cost.more["exchanged_bytes"] = processes.exchanged_bytes - exchanged
    for record in result.log.of_kind("resumed"):
        cost.more["restored_blocks"] = record["blocks"]
    return result, cost
