"""Methods and mergers run by themselves, by FusionBench's `method=surgery` and the like."""

import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
from fusion_bench import BaseAlgorithm, BaseModelPool
from fusion_bench.mixins import LightningFabricMixin
from torch import nn

from fusion_bench_featcal.ending import ends_cleanly
from fusion_bench_featcal.fusionbench.options import check_merger, plain, take_fusion_bench_keys
from fusion_bench_featcal.fusionbench.pool_checks import check_pool_models
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.run_results import RunResults
from fusion_bench_featcal.fusionbench.saving import CompleteSaver
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.methods.anchor_only import AnchorOnly
from fusion_bench_featcal.methods.batch_norm import BatchNormStatistics
from fusion_bench_featcal.methods.distillation import Distillation
from fusion_bench_featcal.methods.interface import MethodInputs, seed_of
from fusion_bench_featcal.methods.mergers import Lot, ProDistill, RegMean, RegMeanPlusPlus
from fusion_bench_featcal.methods.prob_surgery import ProbSurgery
from fusion_bench_featcal.methods.ridge_surgery import RidgeSurgery
from fusion_bench_featcal.methods.surgery import Surgery
from fusion_bench_featcal.methods.surgery_v2 import SurgeryV2
from fusion_bench_featcal.nearest_names import refuse_unknown_settings
from fusion_bench_featcal.results import measure
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.saved_model import CardFacts
from fusion_bench_featcal.settings import CalibrationError

log = logging.getLogger(__name__)

Samples = Mapping[str, Mapping[str, Any]]


class _Standalone(LightningFabricMixin, BaseAlgorithm):
    """A method of ours as a FusionBench method, which checks, runs, evaluates and reports it."""

    kind: ClassVar[Any]
    extra: ClassVar[tuple[str, ...]] = ()  # keys besides the method's
    base_method: Any = None

    def __init_subclass__(cls, kind: Any = None) -> None:
        super().__init_subclass__()
        if kind is not None:
            cls.kind = kind
            extra = {key: key for key in cls.extra}
            cls._config_mapping = BaseAlgorithm._config_mapping | extra | kind._config_mapping

    def __init__(self, **keys: Any) -> None:
        """Check everything that can be checked before a model is loaded.

        Raises:
            ValueError: If a key is unknown or a value out of range.
        """
        meta = take_fusion_bench_keys(keys)
        names = [*self.extra, *self.kind._config_mapping]
        unknown = [key for key in keys if key not in names]
        refuse_unknown_settings(unknown, names, owner=self.kind.name)
        self.base_method = keys.pop("base_method", None)
        check_merger(self.base_method)
        self.method = self.kind(**keys)
        settings = self.method.settings
        for name in self.kind._config_mapping:
            setattr(self, name, settings[name])
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

    extra = ("base_method",)

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
            saver = CompleteSaver(modelpool, _processor(inputs))
            modelpool.save_model = saver  # type: ignore[method-assign]
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


class SurgeryAlgorithm(PostMergingAlgorithm, kind=Surgery):
    """Representation Surgery (arXiv 2402.02705)."""


class ProbSurgeryAlgorithm(PostMergingAlgorithm, kind=ProbSurgery):
    """ProbSurgery (ICML 2025)."""


class RidgeSurgeryAlgorithm(PostMergingAlgorithm, kind=RidgeSurgery):
    """Ridge surgery: an affine correction in closed form."""


class SurgeryV2Algorithm(PostMergingAlgorithm, kind=SurgeryV2):
    """SurgeryV2 (arXiv 2410.14389)."""


class AnchorOnlyAlgorithm(PostMergingAlgorithm, kind=AnchorOnly):
    """FeatCal's anchor alone."""


class BatchNormStatisticsAlgorithm(PostMergingAlgorithm, kind=BatchNormStatistics):
    """BatchNorm's statistics alone, estimated again (arXiv 2211.08403)."""


class DistillationAlgorithm(PostMergingAlgorithm, kind=Distillation):
    """Distillation of final features by gradients."""


class RegMeanAlgorithm(MergerAlgorithm, kind=RegMean):
    """RegMean (Jin et al., ICLR 2023)."""


class RegMeanPlusPlusAlgorithm(MergerAlgorithm, kind=RegMeanPlusPlus):
    """RegMean++ (Nguyen et al., TMLR 2026)."""


class ProDistillAlgorithm(MergerAlgorithm, kind=ProDistill):
    """ProDistill (Xu et al., ICML 2025)."""


class LotAlgorithm(MergerAlgorithm, kind=Lot):
    """LOT Merging (Sun et al., NeurIPS 2025)."""


def _processor(inputs: MethodInputs) -> Any:
    """The pool's processor or tokenizer; None where it has none: not every method needs one."""
    try:
        return inputs.processor
    except CalibrationError:
        return None
