"""Which setting lowers what: the same calibration, predicted with one setting changed."""

from collections.abc import Iterator
from dataclasses import replace

from fusion_bench_featcal.plan.prediction import Lever, Plan, Request, predict
from fusion_bench_featcal.plan.rates import Rates
from fusion_bench_featcal.settings import CalibrationError

WORTH = 0.02
"""A change that lowers nothing by this share is left out."""


def with_levers(request: Request, rates: Rates, plan: Plan) -> Plan:
    """A plan that says what other settings would do.

    Args:
        request: What was predicted.
        rates: The device's rates.
        plan: The prediction.

    Returns:
        The plan with the changes that lower time or memory, the least memory first.
    """
    found = []
    for setting, changed, same_model in _changes(request, plan):
        try:
            other = predict(changed, rates)
        except CalibrationError:  # the pattern leaves a module out that is needed
            continue
        if _lowers(plan, other):
            found.append(
                Lever(setting, other.seconds, other.host, other.gpu, other.read, same_model)
            )
    found.sort(key=lambda lever: (lever.gpu or 0) + lever.host)
    return replace(plan, levers=tuple(found))


def _lowers(plan: Plan, other: Plan) -> bool:
    hosts = (plan.host - plan.own, other.host - other.own)
    pairs = [(plan.seconds, other.seconds), hosts, (plan.gpu, other.gpu), (plan.read, other.read)]
    return any(new < (1 - WORTH) * old for old, new in pairs if old and new is not None)


def _changes(request: Request, plan: Plan) -> Iterator[tuple[str, Request, bool]]:
    """Settings that may lower something, the request with each, and whether the model stays."""
    settings = request.settings

    def with_settings(**changes: object) -> Request:
        return replace(request, settings=settings.replace(**changes))

    if settings.samples_per_task > 1:
        half = settings.samples_per_task // 2
        yield f"samples_per_task={half}", with_settings(samples_per_task=half), False
    if settings.batch_size > 1:
        half = settings.batch_size // 2
        yield f"batch_size={half}", with_settings(batch_size=half), True
    if request.device.type != "cpu" and plan.waiting["device"]:
        yield "activations=host", with_settings(activations="host"), True
    if plan.waiting["device"] + plan.waiting["host"]:
        yield "activations=disk", with_settings(activations="disk"), True
    if request.held or request.base_held:
        yield "stream_experts=true", replace(request, held=0, base_held=False), True
    elif settings.expert_read_budget is None and not request.merges:
        yield "expert_read_budget=50%", with_settings(expert_read_budget="50%"), False
    if request.fused:
        yield "fuse_merge=false", replace(request, fused=False), True
    if settings.log_drift:
        yield "log_drift=false", with_settings(log_drift=False), True
    if settings.mix_alpha > 0:
        off = with_settings(mix_alpha=0.0, log_drift=False)
        yield "mix_alpha=0 log_drift=false", off, False
    if settings.max_length is not None and request.length > 2:
        half = request.length // 2
        shorter = replace(request, length=half, settings=settings.replace(max_length=half))
        yield f"max_length={half}", shorter, False
    if settings.modules is None and plan.widest:
        without = [f"!{name}" for name in plan.widest]
        yield f"modules={without}", with_settings(modules=without), False
