"""Reads of a calibration: planned before the first one, reported when it is done."""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from fusion_bench_featcal.engine.run import BASE, Run
from fusion_bench_featcal.experts import ExpertModel, known_bytes
from fusion_bench_featcal.reads.plan import (
    Reading,
    ReadPlan,
    Visit,
    make_plan,
    plan_hash,
    reading_of,
)
from fusion_bench_featcal.settings import CalibrationError, budget_in_bytes

# Settings that a plan's hash covers: they draw the samples and weigh the update.
_HASHED = (
    "calibration_split", "samples_per_task", "seed", "ridge_lambda", "mix_alpha", "anchor_rho",
    "eps", "log_drift",
)  # fmt: skip


def plan_reads(run: Run, merged: Mapping[str, Tensor]) -> ReadPlan | None:
    """Plan what is read of each expert; the merged model stands in for the rest from now on.

    The log gets the plan in short.

    Args:
        run: The run, which has read nothing yet.
        merged: The merged model's tensors, which stay as they are.

    Returns:
        The plan; None where there is no limit and a source does not tell its sizes.

    Raises:
        CalibrationError: If the limit cannot be kept.
    """
    plan = _make(run)
    omitted = {} if plan is None else plan.omitted
    for task, expert in run.experts.items():
        stood_in = {expert.keys[name]: merged[name] for name in omitted.get(task, ())}
        run.sources[task].serve(stood_in)
    run.log.add("plan", _record(run, plan))
    return plan


def _make(run: Run) -> ReadPlan | None:
    budget = run.settings.expert_read_budget
    mine: dict[str, Reading] | None = None
    try:
        mine = _readings(run)
    except CalibrationError:
        if budget is not None:
            raise
    told = [theirs for theirs in run.processes.gather(mine) if theirs is not None]
    if len(told) < run.processes.size:
        return None
    readings = {task: parts[0] for task, parts in run.shares.collected(told).items()}
    full = make_plan(readings, None)
    if budget is None:
        return full
    limit = budget_in_bytes(budget, full.full)
    if run.merges and limit < full.full:
        raise CalibrationError(
            f"method.expert_read_budget allows {limit} bytes, but merging reads every expert: "
            f"{full.full} bytes. Calibrate a stored merged model (method.base_method=null), or "
            "raise it"
        )
    return make_plan(readings, limit)


def _readings(run: Run) -> dict[str, Reading]:
    """Each expert's reads without a limit."""
    merged = run.merged_at() if run.merges else {}
    visits = [Visit(place, [*merged.get(place, ()), *run.needed_at(place)]) for place in run.places]
    blocks = list(chain.from_iterable(run.stages))
    found: dict[str, Reading] = {}
    for name, expert in run.experts.items():
        sizes = {key: known_bytes(run.sources[name], key) for key in expert.keys.values()}
        place = run.shares.tasks.index(name)
        found[name] = reading_of(place, visits, blocks, expert.keys, sizes.__getitem__)
    return found


def reads_manifest(run: Run, plan: ReadPlan | None) -> dict[str, Any]:
    """Planned and actual reads, fit for JSON.

    Args:
        run: The run, done.
        plan: Its plan.

    Returns:
        The manifest; docs/read_budget.md explains its entries. Of several processes, each one tells
        of the tasks that it leads, the first one of the base.
    """
    planned = {} if plan is None else plan.planned
    mine = {
        name: {
            "places": _places(run, name, planned.get(name)),
            "read": run.reads.read(name),
            "served": run.reads.served(name),
        }
        for name in run.experts
    }
    told = run.shares.collected(run.processes.gather(mine))
    experts = {name: parts[0] for name, parts in told.items()}
    manifest: dict[str, Any] = {
        "format": 1,
        "budget": run.settings.expert_read_budget,
        "plan": None if plan is None else _describe_plan(run, plan),
        "experts": {name: found["places"] for name, found in experts.items()},
        "base": None if run.base is None else _places(run, BASE, _planned_of_base(run, run.base)),
        "totals": {
            "experts_read": sum(found["read"] for found in experts.values()),
            "experts_planned": None if plan is None else plan.bytes,
            "base_read": run.reads.read(BASE),
            "merged_stood_in": sum(found["served"] for found in experts.values()),
            "output": sum(map(_bytes_of(run), _new_parameters(run))),
        },
    }
    return manifest


def _record(run: Run, plan: ReadPlan | None) -> dict[str, Any]:
    """The plan in short, for the log."""
    if plan is None:
        return {"expert_bytes": None}
    omitted = {expert: len(_modules(names)) for expert, names in plan.omitted.items()}
    return {
        "hash": _hash(run, plan),
        "limit": plan.limit,
        "full": plan.full,
        "expert_bytes": plan.bytes,
        "omitted_modules": omitted,
    }


def _hash(run: Run, plan: ReadPlan) -> str:
    settings = run.settings.as_dict()
    depends = {
        "settings": {name: settings[name] for name in _HASHED},
        "modules": {
            block: [site.name for site in found.sites] for block, found in run.modules.items()
        },
        "experts": list(run.shares.tasks),
        "order": plan.order,
    }
    return plan_hash(plan, depends)


def _describe_plan(run: Run, plan: ReadPlan) -> dict[str, Any]:
    return {
        "hash": _hash(run, plan),
        "limit": plan.limit,
        "full": plan.full,
        "least": plan.least,
        "bytes": plan.bytes,
        "order": plan.order,
        "omitted": {expert: _modules(names) for expert, names in plan.omitted.items()},
        "stale_from": _stale_from(run, plan),
    }


def _modules(names: Any) -> list[str]:
    """The modules that hold some tensors, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))


def _stale_from(run: Run, plan: ReadPlan) -> dict[str, str]:
    """The first block that an expert's own features do not pass whole, where it runs at all."""
    blocks = list(chain.from_iterable(run.stages)) if run.uses_expert_features else []
    found: dict[str, str] = {}
    for expert, names in plan.omitted.items():
        hit = [b for b in blocks if any(name.startswith(f"{b}.") for name in names)]
        if hit:
            found[expert] = hit[0]
    return found


def _places(run: Run, model: str, planned: Mapping[str, int] | None) -> dict[str, Any]:
    places: dict[str, None] = dict.fromkeys([*(planned or {}), *run.reads.places(model)])
    return {
        place: {
            "planned": None if planned is None else planned.get(place, 0),
            "read": run.reads.read(model, place),
        }
        for place in places
    }


def _planned_of_base(run: Run, base: ExpertModel) -> dict[str, int] | None:
    """Place -> bytes: the base is read for the anchors of calibrated modules."""
    reads = run.settings.anchor_rho != 1
    try:
        return {
            block: sum(base.nbytes(n) for site in found.sites for n in site.names) if reads else 0
            for block, found in run.modules.items()
        }
    except CalibrationError:
        return None


def _new_parameters(run: Run) -> list[str]:
    """Names of the calibrated parameters."""
    return [name for block in run.modules for name in run.calibrated_in(block)]


def _bytes_of(run: Run) -> Any:
    def size(name: str) -> int:
        parameter = run.model.get_parameter(name)
        return parameter.numel() * parameter.element_size()

    return size
