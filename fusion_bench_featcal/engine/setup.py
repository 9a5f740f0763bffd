"""Set up a block loop's problem: find the blocks, copy the model, pair the experts' weights."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fusion_bench_featcal.core.kernels import with_kernel
from fusion_bench_featcal.engine.modules import find_all_modules
from fusion_bench_featcal.engine.problem import Autocast, Problem, copied, tensors_of_head
from fusion_bench_featcal.experts import ExpertModel, ExpertSource, source_of
from fusion_bench_featcal.experts.model_config import check_same_function, config_of
from fusion_bench_featcal.experts.reading import BASE, Reads
from fusion_bench_featcal.families import Family
from fusion_bench_featcal.settings import FeatCalSettings


def set_up(
    shown: nn.Module,
    base: nn.Module | ExpertSource | None,
    experts: Mapping[str, nn.Module | ExpertSource],
    settings: FeatCalSettings,
    family: Family,
    *,
    device: torch.device,
    autocast: Autocast,
    kernel: str,
    mine: Iterable[str] | None = None,
    in_place: bool = False,
    routed: bool = False,
    watched: Callable[[str, Any], Any] = lambda name, source: source,
) -> tuple[Problem, Reads]:
    """Set up a problem; of the experts' weights only names and shapes are read.

    Args:
        shown: The model to start from, as its family shows it.
        base: As `calibrate` takes it, and so `experts`, `settings` and `autocast`.
        experts: Experts by task.
        settings: Settings.
        family: How the model is cut into blocks.
        device: Device of the computation.
        autocast: Makes the context of forward passes.
        kernel: The product kernel of forward passes on a CPU.
        mine: The tasks that this process works on, whose experts alone are asked for; None: all.
        in_place: Whether `shown` itself is changed.
        routed: As for `find_modules`.
        watched: Wraps the source of a model's weights, given its name.

    Returns:
        The problem and its reads.

    Raises:
        CalibrationError: If a module cannot be calibrated, weights do not fit the model or memory
            is short.
    """
    stages = family.stages(shown)
    modules = find_all_modules(shown, stages, settings, routed=routed)
    model = copied(shown, device, in_place=in_place)
    reads, heads = Reads(), set(tensors_of_head(model, stages[0][0]))

    def paired(name: str, source: nn.Module | ExpertSource, role: str = "expert") -> ExpertModel:
        counted = reads.counted(name, family.view.source(source_of(source)))
        expert = ExpertModel(name, watched(name, counted), model, role=role, spared=heads)
        configs = config_of(source), config_of(shown)
        check_same_function(name, *configs, settings.ignore_config, role=role)
        return expert

    problem = Problem(
        model=model,
        base=None if base is None else paired(BASE, base, "base model"),
        experts={task: paired(task, experts[task]) for task in mine or experts},
        tasks=tuple(experts),
        family=family,
        settings=settings,
        stages=stages,
        modules=modules,
        autocast=with_kernel(kernel, autocast),
    )
    return problem, reads
