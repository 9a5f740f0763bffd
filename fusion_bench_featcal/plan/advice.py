"""What to lower when a running calibration is out of memory."""

from fusion_bench_featcal.engine.run import Run
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.plan.constants import constants
from fusion_bench_featcal.plan.inputs import without_masks
from fusion_bench_featcal.plan.memory import predict_memory
from fusion_bench_featcal.plan.show import advice
from fusion_bench_featcal.plan.work import count_work

GENERAL = (
    "Lower method.batch_size or method.samples_per_task, or set method.activations=disk or "
    "method.stream_experts=true"
)


def memory_advice(run: Run) -> str:
    """Which settings lower what a run's memory is for, the largest part first.

    Args:
        run: The run, at whatever point.

    Returns:
        A sentence for messages; a general one where the parts cannot be told.
    """
    try:
        settings = run.settings.replace(family=run.family)
        work = count_work(hollow_copy(run.model).to("meta"), without_masks(run.example), settings)
        memory = predict_memory(work, settings, len(run.experts), constants())
        return advice(memory.parts, {"device": int(settings.activations != "disk")})
    except Exception:  # whatever it is, the error at hand is the one to report
        return GENERAL
