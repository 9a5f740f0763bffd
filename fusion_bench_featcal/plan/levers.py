"""Other settings, and what they would lower."""

from collections.abc import Iterator
from dataclasses import replace

from fusion_bench_featcal.plan.estimate import WORTH, Lever, Plan, Request, estimate
from fusion_bench_featcal.plan.probe import Rate
from fusion_bench_featcal.settings import CalibrationError


def with_levers(request: Request, plan: Plan, rate: Rate | None = None) -> Plan:
    """Add the settings to a request's plan that lower time, memory or reads, least memory first."""
    found = []
    for setting, changed, same_model in _changes(request, plan):
        try:
            other = estimate(changed, rate)
        except CalibrationError:  # the pattern leaves a module out that is needed
            continue
        if any(
            new < (1 - WORTH) * old for new, old in zip(_costs(other), _costs(plan), strict=True)
        ):
            # This process grows while it estimates, which the settings do not change.
            host = other.host - other.own + plan.own
            found.append(Lever(setting, other.seconds, host, other.gpu, other.read, same_model))
    found.sort(key=lambda lever: (lever.gpu or 0) + lever.host)
    return replace(plan, levers=tuple(found))


def _costs(plan: Plan) -> tuple[float, ...]:
    return plan.seconds, plan.host - plan.own, plan.gpu or 0, plan.read


def _changes(request: Request, plan: Plan) -> Iterator[tuple[str, Request, bool]]:
    """Settings that may lower something, the request with each, and whether the model stays."""
    settings, one = request.settings, request.settings.trials in (1, "auto")

    def changed(**changes: object) -> Request:
        return replace(request, settings=settings.replace(**changes))

    if (half := settings.samples_per_task // 2) > 0:
        yield f"samples_per_task={half}", changed(samples_per_task=half), False
    if (half := settings.batch_size // 2) > 0:
        yield f"batch_size={half}", changed(batch_size=half), True
    if request.device.type != "cpu" and plan.waiting["device"]:
        yield "activations=host", changed(activations="host"), True
    if plan.waiting["device"] + plan.waiting["host"]:
        yield "activations=disk", changed(activations="disk"), True
    if request.held or request.base_held:
        yield "stream_experts=true", replace(request, held=0, base_held=False), True
    elif settings.expert_read_budget is None and (request.fused or not request.merges) and one:
        yield "expert_read_budget=50%", changed(expert_read_budget="50%"), False
    if request.fused:
        yield "fuse_merge=false", replace(request, fused=False), True
    if plan.calibrations > 1:
        yield "trials=1", changed(trials=1), False
    if settings.log_drift and settings.held_out == 0:
        yield "log_drift=false", changed(log_drift=False), True
    if settings.is_paper and settings.mix_alpha > 0 and settings.held_out == 0:
        yield "mix_alpha=0 log_drift=false", changed(mix_alpha=0.0, log_drift=False), False
    if settings.max_length is not None and (half := request.length // 2) > 1:
        shorter = replace(request, length=half, settings=settings.replace(max_length=half))
        yield f"max_length={half}", shorter, False
    if settings.modules is None and plan.widest:
        without = [f"!{name}" for name in plan.widest]
        yield f"modules={without}", changed(modules=without), False
