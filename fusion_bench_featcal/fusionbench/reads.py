"""Reads of a pool's files on FusionBench's side of a run."""

from collections.abc import Sequence
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.experts import ExpertSource, known_bytes
from fusion_bench_featcal.experts.read_plan import budget_left
from fusion_bench_featcal.fusionbench.pool_models import BASE_MODEL, MERGED_MODEL, file_source
from fusion_bench_featcal.fusionbench.run_results import method_name
from fusion_bench_featcal.settings import CalibrationError, FeatCalSettings

BY_ITSELF, FUSED, EARLIER = "by itself", "fused", "earlier"


def check_read_budgets(modelpool: BaseModelPool, runs: Sequence[FeatCalSettings]) -> None:
    """Refuse a read budget where an expert in files would be loaded whole.

    Args:
        modelpool: The pool.
        runs: Settings of the calibrations to come.

    Raises:
        CalibrationError: Naming the expert and the setting.
    """
    if all(settings.expert_read_budget is None for settings in runs):
        return
    for name in modelpool.model_names:
        if isinstance(modelpool._models[name], nn.Module):
            continue  # in memory anyway
        if _source_or_none(modelpool, name) is None:
            raise CalibrationError(
                f"method.expert_read_budget cannot be kept: expert {name!r} "
                f"({modelpool._models[name]!r}) has no safetensors files to read block by block, "
                f"so it is loaded whole. Save it as safetensors (modelpool.models.{name}), or set "
                "method.expert_read_budget=null"
            )


def budget_beside_merger(
    modelpool: BaseModelPool, base_method: Any, settings: FeatCalSettings, *, fused: bool
) -> float | str | None:
    """Rest of a read budget that the upstream merger leaves to the calibration.

    Args:
        modelpool: The pool.
        base_method: `method.base_method`; None: the pool's own merged model, which is no expert.
        settings: Settings of the calibration.
        fused: Whether it shares the merger's reads.

    Returns:
        The calibration's own budget; None: no limit.

    Raises:
        CalibrationError: If the merger alone reads more than the budget.
    """
    budget = settings.expert_read_budget
    if budget is None or base_method is None:
        return budget
    upstream = sum(_file_bytes(modelpool, name) or 0 for name in modelpool.model_names)
    return budget_left(budget, upstream, method_name(base_method), fused=fused)


def add_upstream(
    reads: dict[str, Any], modelpool: BaseModelPool, base_method: Any, how: str
) -> None:
    """Add what the upstream merger reads to a calibration's manifest of reads, and to its totals.

    Args:
        reads: The manifest.
        modelpool: The pool.
        base_method: `method.base_method`; None: the pool's own merged model is loaded.
        how: `by itself`; `fused`, with this calibration's reads; or `earlier`, for another
            calibration of the run.
    """
    merger = None if base_method is None else method_name(base_method)
    names: list[str] = []
    if merger is None:
        names = [MERGED_MODEL] if how != EARLIER else []
    elif how == BY_ITSELF or (how == FUSED and merger == "task_arithmetic"):
        reads_base = modelpool.has_pretrained and merger != "simple_average"
        names = [BASE_MODEL] if reads_base else []
    if merger is not None and how == BY_ITSELF:
        names += modelpool.model_names
    files = {name: _file_bytes(modelpool, name) for name in names}
    reads["upstream"] = {"merger": merger, "how": how, "files": files}
    totals = reads["totals"]
    for key, chosen in (
        ("upstream_experts_read", modelpool.model_names),
        ("upstream_base_read", [BASE_MODEL]),
        ("merged_read", [MERGED_MODEL]),
    ):
        sizes = [files[name] for name in chosen if name in files]
        totals[key] = None if None in sizes else sum(size for size in sizes if size)
    besides = totals["upstream_experts_read"]
    totals["all_experts_read"] = None if besides is None else totals["experts_read"] + besides


def _file_bytes(modelpool: BaseModelPool, name: str) -> int | None:
    if isinstance(modelpool._models[name], nn.Module):
        return 0
    source = _source_or_none(modelpool, name)
    return None if source is None else sum(known_bytes(source, n) for n in source.names())


def _source_or_none(modelpool: BaseModelPool, name: str) -> ExpertSource | None:
    try:
        return file_source(modelpool, name)
    except FileNotFoundError:  # files of another kind
        return None
