"""A baseline run by itself: what it makes is evaluated and reported as FeatCal's is."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.fusionbench.model_card import CardFacts
from fusion_bench_featcal.fusionbench.options import MERGED, plain
from fusion_bench_featcal.fusionbench.processors import load_input_processor
from fusion_bench_featcal.fusionbench.program import upstream_model
from fusion_bench_featcal.fusionbench.run_results import (
    RunResults,
    log_reports,
    method_name,
    suite_name,
)
from fusion_bench_featcal.fusionbench.saving import RowSaver, skip_saving
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

Made = TypeVar("Made", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Entries of a model's row in the report besides its accuracy.

    Attributes:
        name: Its row.
        settings: What made it.
        seed: Of samples and training; None for what draws nothing.
        samples: Model -> task -> {"samples", "split"} really used.
    """

    name: str
    settings: Mapping[str, Any]
    seed: int | None
    samples: Callable[[Any], Mapping[str, Mapping[str, Any]]]


def run_post_merging(
    algorithm: Any, modelpool: BaseModelPool, row: Row, make: Callable[[nn.Module], Made]
) -> Made:
    """Merge with `base_method`, improve the merged model, report both.

    Args:
        algorithm: The FusionBench method that runs.
        modelpool: The pool.
        row: The improved model's row.
        make: Improves the merged model.

    Returns:
        The improved model.

    Raises:
        CalibrationError: If there is no merged model.
    """
    merged = upstream_model(algorithm._program, algorithm.base_method, modelpool)
    if not _is_run(algorithm):
        return make(merged)
    config = algorithm.base_method
    upstream = MERGED if config is None else method_name(config)
    results = _results(algorithm, modelpool, upstream)
    results.add_reference(upstream, merged, plain(config))
    return _report(algorithm, modelpool, results, row, lambda: make(merged))


def run_merging(
    algorithm: Any, modelpool: BaseModelPool, row: Row, make: Callable[[], Made]
) -> Made:
    """Merge and report.

    Args:
        algorithm: The FusionBench method that runs.
        modelpool: The pool.
        row: The merged model's row.
        make: Merges.

    Returns:
        The merged model.
    """
    if not _is_run(algorithm):
        return make()
    return _report(algorithm, modelpool, _results(algorithm, modelpool, row.name), row, make)


def _is_run(algorithm: Any) -> bool:
    """Return whether the program runs this method; else it is a part of another, which reports."""
    return getattr(algorithm._program, "method", None) is algorithm


def _results(algorithm: Any, modelpool: BaseModelPool, upstream: str) -> RunResults:
    return RunResults(
        algorithm._program.taskpool,
        algorithm.log_dir,
        suite=suite_name(modelpool),
        upstream=upstream,
        device=algorithm.fabric.device,
    )


def _report(
    algorithm: Any,
    modelpool: BaseModelPool,
    results: RunResults,
    row: Row,
    make: Callable[[], Made],
) -> Made:
    log.info("making %s", row.name)
    with measure() as cost:
        model = make()
    log.info("made %s in %.1f s", row.name, cost.seconds)
    saver = RowSaver(algorithm._program, modelpool, _processor(modelpool), row.name)
    upstream = getattr(algorithm, "base_method", None)
    saver.offer(model, CardFacts(row.name, upstream, row.settings, row.samples(model)))
    evaluation = results.add_made(
        row.name,
        model,
        settings=row.settings,
        cost=cost,
        samples=row.samples(model),
        seed=row.seed,
    )
    results.finish(algorithm._program, model, evaluation, row.name, saver.folder)
    saver.finish(results.report)
    if algorithm.log_dir is not None:
        write_curves(algorithm.log_dir, {row.name: getattr(model, "curves", {})})
    log_reports(algorithm.fabric, [results.report])
    skip_saving(algorithm._program, model)
    return model


def _processor(modelpool: BaseModelPool) -> Any:
    """Return the pool's processor or tokenizer; None where it has none."""
    try:
        return load_input_processor(modelpool)
    except CalibrationError:  # not every merger needs one
        return None
