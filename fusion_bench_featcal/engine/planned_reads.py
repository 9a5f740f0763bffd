"""Reads of a calibration: planned before the first one, reported when it is done."""

from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor

from fusion_bench_featcal.checkpoints.sources import Reads as Digests
from fusion_bench_featcal.checkpoints.sources import as_hashes, joined_reads
from fusion_bench_featcal.digests import digest_tensor
from fusion_bench_featcal.engine.problem import Problem
from fusion_bench_featcal.engine.team import Alone, Team
from fusion_bench_featcal.experts import known_bytes
from fusion_bench_featcal.experts.merging import FusedMerge
from fusion_bench_featcal.experts.read_plan import (
    Read,
    ReadPlan,
    make_plan,
    plan_hash,
    reads_of,
)
from fusion_bench_featcal.experts.reading import BASE, Reads
from fusion_bench_featcal.json_files import digest_json
from fusion_bench_featcal.setting_checks import budget_in_bytes
from fusion_bench_featcal.settings import CalibrationError

# Settings that a plan's hash covers: they draw the samples and weigh the update.
_HASHED = (
    "calibration_split", "samples_per_task", "seed", "ridge_lambda", "mix_alpha", "anchor_rho",
    "eps", "ridge", "stages", "first_ridge_scale", "log_drift",
)  # fmt: skip


class PlannedReads:
    """The plan of a calibration's reads, and what became of it."""

    def __init__(
        self,
        problem: Problem,
        reads: Reads,
        team: Alone | Team,
        merged: Mapping[str, Tensor],
        fused: FusedMerge | None,
    ) -> None:
        """Plan what is read of each expert; the merged model stands in for the rest from now on.

        Args:
            problem: The problem; nothing has been read yet.
            reads: Its reads, with all visits.
            team: The processes.
            merged: The merged model's tensors, which stay as they are.
            fused: The upstream merger that runs on the way; None: `merged` is merged already.

        Raises:
            CalibrationError: If the limit cannot be kept.
        """
        self._problem, self._reads, self._team = problem, reads, team
        self._merged = merged
        self.plan = self._make({} if fused is None else fused.places)
        omitted = {} if self.plan is None else self.plan.omitted
        for task, expert in problem.experts.items():
            stand_ins = {expert.keys[name]: merged[name] for name in omitted.get(task, ())}
            reads.sources[task].stand_ins = stand_ins

    def _make(self, merged_at: Mapping[str, Iterable[str]]) -> ReadPlan | None:
        """The plan; None where there is no limit and a source does not tell its sizes."""
        budget = self._problem.settings.expert_read_budget
        own: dict[str, list[Read]] | None = None
        try:
            own = self._all_reads(merged_at)
        except CalibrationError:
            if budget is not None:
                raise
        gathered = self._team.gather(own)
        listed = [reads for reads in gathered if reads is not None]
        if len(listed) < len(gathered):
            return None
        reads = {task: first for task, (first, *_) in self._team.collected(listed).items()}
        full = make_plan(reads, None)
        if budget is None:
            return full
        return make_plan(reads, budget_in_bytes(budget, full.full))

    def _all_reads(self, merged_at: Mapping[str, Iterable[str]]) -> dict[str, list[Read]]:
        """Each expert's reads without a limit."""
        problem, blocks = self._problem, list(chain.from_iterable(self._problem.stages))
        visits = {p: [*merged_at.get(p, ()), *names] for p, names in self._reads.visits.items()}
        reads: dict[str, list[Read]] = {}
        for task, expert in problem.experts.items():
            size = partial(known_bytes, self._reads.sources[task])
            number = problem.tasks.index(task)
            reads[task] = reads_of(number, visits, blocks, expert.keys, size)
        return reads

    def record(self) -> dict[str, Any]:
        """The plan in short, for the log."""
        plan = self.plan
        if plan is None:
            return {"expert_bytes": None}
        return {
            "hash": self._hash(plan),
            "limit": plan.limit,
            "full": plan.full,
            "expert_bytes": plan.bytes,
            "omitted_modules": {e: len(_modules(names)) for e, names in plan.omitted.items()},
        }

    def manifest(self, digests: Digests | None = None) -> dict[str, Any]:
        """Planned and actual reads, fit for JSON; docs/read_budget.md explains the entries.

        Of several processes, each reports the tasks that it leads, the first one the base. Under
        FeatCal+ each reads the base's part that it solves with; the parts are added up.

        Args:
            digests: Model -> name -> digest of the tensors that this process was given; None: they
                were not hashed.
        """
        plan, reads, problem = self.plan, self._reads, self._problem
        planned = {} if plan is None else plan.planned
        nothing = dict.fromkeys(reads.visits, 0)
        own = {
            task: (
                self._places(task, {**nothing, **planned[task]} if task in planned else None),
                reads.read(task),
                reads.sources[task].stood_in,
            )
            for task in problem.experts
        }
        collected = self._team.collected(self._team.gather(own))
        of_base = {place: reads.read(BASE, place) for place in reads.places(BASE)}
        gathered = self._team.gather(of_base)
        if not problem.settings.is_paper:
            reads.total(BASE, gathered)
        experts = {task: first for task, (first, *_) in collected.items()}
        parameters = [
            problem.model.get_parameter(name)
            for block in problem.modules
            for name in problem.calibrated_in(block)
        ]
        base = None if problem.base is None else self._places(BASE, self._planned_of_base())
        return {
            "format": 1,
            "budget": problem.settings.expert_read_budget,
            "plan": None if plan is None else self._describe(plan),
            "experts": {task: places for task, (places, _, _) in experts.items()},
            "base": base,
            "modules": {b: [site.name for site in m.sites] for b, m in problem.modules.items()},
            "hashes": None if digests is None else self._hashes(digests),
            "totals": {
                "experts_read": sum(read for _, read, _ in experts.values()),
                "experts_planned": None if plan is None else plan.bytes,
                "base_read": reads.read(BASE),
                "merged_stood_in": sum(stood_in for _, _, stood_in in experts.values()),
                "output": sum(parameter.nbytes for parameter in parameters),
            },
        }

    def _hashes(self, digests: Digests) -> dict[str, Any]:
        """Digests of what was read and of the merged model; what stood in for a tensor has none."""
        own = {}
        for model, names in digests.items():
            stand_ins = self._reads.sources[model].stand_ins
            own[model] = {name: text for name, text in names.items() if name not in stand_ins}
        models = joined_reads(self._team.gather(own), [BASE, *self._problem.tasks])
        merged = {name: digest_tensor(tensor) for name, tensor in self._merged.items()}
        return as_hashes(models, digest_json(merged))

    def _hash(self, plan: ReadPlan) -> str:
        problem, settings = self._problem, self._problem.settings.as_dict()
        depends = {
            "settings": {name: settings[name] for name in _HASHED},
            "modules": {b: [s.name for s in m.sites] for b, m in problem.modules.items()},
            "experts": list(problem.tasks),
            "order": plan.order,
        }
        return plan_hash(plan, depends)

    def _describe(self, plan: ReadPlan) -> dict[str, Any]:
        return {
            "hash": self._hash(plan),
            "limit": plan.limit,
            "full": plan.full,
            "least": plan.least,
            "bytes": plan.bytes,
            "order": plan.order,
            "omitted": {expert: _modules(names) for expert, names in plan.omitted.items()},
            "stale_from": self._stale_from(plan),
        }

    def _stale_from(self, plan: ReadPlan) -> dict[str, str]:
        """The first block that an expert's own features do not pass whole, where it runs at all."""
        runs = self._problem.settings.runs_experts
        stale: dict[str, str] = {}
        for expert, names in plan.omitted.items() if runs else ():
            for block in chain.from_iterable(self._problem.stages):
                if any(name.startswith(f"{block}.") for name in names):
                    stale.setdefault(expert, block)
        return stale

    def _places(self, model: str, planned: Mapping[str, int] | None) -> dict[str, Any]:
        places = [*(planned or {}), *self._reads.places(model)]
        return {
            place: {
                "planned": None if planned is None else planned.get(place, 0),
                "read": self._reads.read(model, place),
            }
            for place in dict.fromkeys(places)
        }

    def _planned_of_base(self) -> dict[str, int] | None:
        """Place -> bytes: the base is read for the anchors of calibrated modules."""
        base, visits = self._problem.base, self._reads.base_visits
        assert base is not None
        try:
            blocks = dict.fromkeys(self._problem.modules, 0)
            return blocks | {place: sum(map(base.nbytes, n)) for place, n in visits.items()}
        except CalibrationError:  # it does not tell its sizes
            return None


def _modules(names: Iterable[str]) -> list[str]:
    """The modules that hold some tensors, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names))
