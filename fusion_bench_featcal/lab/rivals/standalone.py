"""Methods and mergers run by themselves, by FusionBench's `method=surgery` and the like."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn

from fusion_bench_featcal.ending import ends_cleanly
from fusion_bench_featcal.fusionbench.options import (
    MergedBy,
    names_of,
    plain,
    read_settings,
    take_fusion_bench_keys,
)
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.lab.rivals.interface import seed_of
from fusion_bench_featcal.lab.rivals.registry import Method
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.saved_model import CardFacts
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

Samples = Mapping[str, Mapping[str, Any]]


class _Standalone(LightningFabricMixin, BaseAlgorithm):
    """A method of ours as a FusionBench method, which checks, runs, evaluates and reports it."""

    setting_kinds: ClassVar[Sequence[Any]]  # the method's class is the first one
    base_method: Any = None

    def __init__(self, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value is not accepted.
        """
        meta = take_fusion_bench_keys(keys)
        made = read_settings(keys, self.setting_kinds, self.setting_kinds[0].name)
        self.method: Any = made[0]
        values = {"base_method": None, **vars(made[-1]), **self.method.settings}
        for name in names_of(self.setting_kinds):
            setattr(self, name, values[name])
        super().__init__(**meta)

    def on_run_start(self) -> None:
        """Take the suite's own task pool where none was named; check the log directory."""
        prepare_run(self._program, self.log_dir)

    def _checked_inputs(self, modelpool: BaseModelPool) -> MethodInputs:
        if self.fabric.world_size > 1:
            raise CalibrationError("this method runs on one device: set fabric.devices=1")
        inputs = MethodInputs(modelpool, getattr(self._program, "taskpool", None), self.fabric)
        check_pool_models(inputs.models, self.fabric)
        self.method.check(inputs)
        return inputs

    @property
    def _is_run(self) -> bool:
        """True if the program runs this method; else it is a part of another, which reports."""
        return getattr(self._program, "method", None) is self

    def _results(self, inputs: MethodInputs, upstream: str) -> RunResults:
        pool, processor = inputs.modelpool, _processor(inputs)
        return RunResults(self, pool, processor, upstream=upstream, row=self.method.name)

    def _report(
        self,
        results: RunResults,
        settings: Mapping[str, Any],
        make: Callable[[], nn.Module],
        samples: Callable[[nn.Module], Samples],
    ) -> nn.Module:
        """Make the model; save, evaluate and report it as FeatCal's is."""
        name = self.method.name
        log.info("making %s", name)
        with measure() as cost:
            model = make()
        log.info("made %s in %.1f s", name, cost.seconds)
        used, seed = samples(model), seed_of(self.method.settings)
        results.saver.offer(model, CardFacts(name, self.base_method, settings, used))
        results.add_made(name, model, settings=settings, cost=cost, samples=used, seed=seed)
        results.finish()
        if self.log_dir is not None:
            write_curves(self.log_dir, {name: getattr(model, "curves", {})})
        return model


class PostMergingAlgorithm(_Standalone):
    """A post-merging method over an upstream merger.

    Keys: those of the method, and `base_method` (config of the upstream merger; None takes the
    pool's `_merged_` model).
    """

    @ends_cleanly
    def run(self, modelpool: BaseModelPool) -> Any:  # type: ignore[override]
        """Merge with `base_method`, improve the merged model, report both.

        Args:
            modelpool: Base, experts and data.

        Returns:
            The improved model.

        Raises:
            CalibrationError: If the run cannot go on; most reasons are found before anything is
                merged.
        """
        inputs = self._checked_inputs(modelpool)
        upstream = Upstream(self.base_method, inputs.models)
        merged = upstream.merged_model(self._program)

        def make() -> nn.Module:
            return self.method.post_merge(merged, inputs)

        def samples(model: nn.Module) -> Samples:
            return self.method.samples(model, modelpool.model_names)

        if self._is_run:
            results = self._results(inputs, upstream.name)
            results.add_reference(upstream.name, merged, plain(self.base_method))
            model = self._report(results, self.method.settings, make, samples)
        else:
            model = make()
        if any(used["split"] == "test" for used in samples(model).values()):
            log.warning("%s was fitted on samples of the test split", self.method.name)
        return model


class MergerAlgorithm(_Standalone):
    """A merger that starts from the pool's experts. Keys: those of the merger."""

    @ends_cleanly
    def run(self, modelpool: BaseModelPool) -> nn.Module:  # type: ignore[override]
        """Merge the pool's experts, and report where the program runs this method itself.

        Args:
            modelpool: Base, experts and data.

        Returns:
            The merged model.

        Raises:
            CalibrationError: If the run cannot go on.
        """
        inputs = self._checked_inputs(modelpool)
        if not self._is_run:
            return self.method.merge(inputs)
        return self._report(
            self._results(inputs, self.method.name),
            # As `method=compare` notes them for a merger.
            plain(getattr(self._program, "_method", None)) or self.method.settings,
            lambda: self.method.merge(inputs),
            lambda model: self.method.samples(inputs, modelpool.model_names),
        )


@cache
def algorithm_of(kind: type[Method]) -> type[Any]:
    """Return the FusionBench class of a registered method."""
    is_merger = hasattr(kind, "merge")
    kinds = [kind] if is_merger else [kind, MergedBy]
    members = {
        "__doc__": kind.__doc__,
        "__module__": __package__,
        "setting_kinds": kinds,
        "_config_mapping": BaseAlgorithm._config_mapping | {n: n for n in names_of(kinds)},
    }
    base = MergerAlgorithm if is_merger else PostMergingAlgorithm
    return type(f"{kind.__name__}Algorithm", (base,), members)


def _processor(inputs: MethodInputs) -> Any:
    """The pool's processor or tokenizer; None where it has none: not every method needs one."""
    try:
        return inputs.processor
    except CalibrationError:
        return None
