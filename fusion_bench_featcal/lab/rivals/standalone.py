"""Methods as separate runs, by FusionBench's `method=surgery` and others."""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from fusion_bench import BaseModelPool
from torch import nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.fusionbench.inputs import MethodInputs
from fusion_bench_featcal.fusionbench.method import DeclaredMethod
from fusion_bench_featcal.fusionbench.options import MergedBy, plain
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.lab.rivals.method import Method
from fusion_bench_featcal.models.saving import CardFacts
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.run import training_lines

log = logging.getLogger(__name__)


class MethodAlgorithm(DeclaredMethod):
    """A method of this package as a FusionBench method, which checks, runs and evaluates it.

    Its keys are the method's settings and, for post-merging methods, `base_method` (config of the
    upstream merger, by default the pool's `_merged_` model).
    """

    base_method: Any = None

    def __init__(self, **keys: Any) -> None:
        """Check all settings before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        super().__init__(**keys)
        self.method: Any = self.declared[0]

    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Build the model, and report it if the program runs this method itself.

        Args:
            modelpool: Base, experts and data.

        Returns:
            The merged or improved model.

        Raises:
            CalibrationError: If the run cannot go on. Most reasons are detected before merging.
        """
        method, program, inputs = self.method, self._program, self.inputs(modelpool)
        self.check(inputs)
        self.open(inputs)
        merged, upstream, make = None, method.name, partial(self._made, inputs)
        if not hasattr(method, "merge"):
            merger = self._upstream(inputs)
            merged, upstream = merger.merged_model(program), merger.name
            make = partial(self._made, inputs, merged)
        is_run = getattr(program, "method", None) is self  # else another method reports
        return self._reported(inputs, upstream, merged, make) if is_run else make()

    @property
    def planned_rows(self) -> dict[str, int]:
        """The method's row is made once."""
        return {self.method.name: 1}

    def check(self, inputs: MethodInputs) -> None:
        """Refuse a merger or pool that cannot be used. Nothing is opened."""
        super().check(inputs)
        if not hasattr(self.method, "merge"):
            self._upstream(inputs)

    def open(self, inputs: MethodInputs) -> None:
        """Open models and data."""
        super().open(inputs)
        self.method.check(inputs)

    def _upstream(self, inputs: MethodInputs) -> Upstream:
        return Upstream(self.base_method, inputs.models)

    def _made(self, inputs: MethodInputs, merged: nn.Module | None = None) -> nn.Module:
        """Return the merger's model, or the improved one."""
        method = self.method
        model = method.merge(inputs) if merged is None else method.post_merge(merged, inputs)
        if "test" in (used["split"] for used in method.samples(inputs.models.experts).values()):
            log.warning("%s was fitted on samples of the test split", method.name)
        return model

    def _reported(
        self,
        inputs: MethodInputs,
        upstream: str,
        merged: nn.Module | None,
        make: Callable[[], nn.Module],
    ) -> nn.Module:
        """Build the model. Save, evaluate and report it like a model of FeatCal."""
        method, pool, processor = self.method, inputs.modelpool, None
        with suppress(CalibrationError):  # some methods need no processor
            processor = inputs.processor
        results = RunResults(self, pool, processor, upstream=upstream, row=method.name)
        settings = method.settings
        if merged is not None:
            results.add_row(upstream, merged, settings=plain(self.base_method))
        else:  # a merger, recorded as by `method=compare`
            settings = plain(getattr(self._program, "_method", None)) or settings
        log.info("making %s", method.name)
        with measure() as cost:
            model = make()
        log.info("made %s in %.1f s", method.name, cost.seconds)
        samples, seed = method.samples(pool.model_names), method.settings.get("seed")
        results.saver.offer(model, CardFacts(method.name, self.base_method, settings, samples))
        details = {"settings": settings, "cost": cost, "samples": samples, "seed": seed}
        results.add_row(method.name, model, **details)
        results.report.lines += training_lines(method.name, getattr(model, "curves", {}))
        return results.finish()


@cache
def algorithm_of(kind: type[Method]) -> type[Any]:
    """Return the FusionBench class of a method."""
    kinds = [kind] if hasattr(kind, "merge") else [kind, MergedBy]
    members = {"__doc__": kind.__doc__, "__module__": __package__, "setting_kinds": kinds}
    return type(f"{kind.__name__}Algorithm", (MethodAlgorithm,), members)
