"""Methods as separate runs, by FusionBench's `method=surgery` and others."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from torch import nn

from fusion_bench_featcal.fusionbench.driver import RowsMethod
from fusion_bench_featcal.fusionbench.rows import Method
from fusion_bench_featcal.fusionbench.run_settings import MergedBy, plain_config
from fusion_bench_featcal.lab.rivals.dc_merge import DCMerge
from fusion_bench_featcal.lab.rivals.distillation import Distillation
from fusion_bench_featcal.lab.rivals.esm import ESM
from fusion_bench_featcal.lab.rivals.harc import HARC
from fusion_bench_featcal.lab.rivals.larv import LARV
from fusion_bench_featcal.lab.rivals.lot import Lot
from fusion_bench_featcal.lab.rivals.polish import Polish
from fusion_bench_featcal.lab.rivals.react import ReACT
from fusion_bench_featcal.lab.rivals.regmean import RegMean, RegMeanPlusPlus
from fusion_bench_featcal.lab.rivals.ridge_surgery import RidgeSurgery
from fusion_bench_featcal.lab.rivals.surgery import ProbSurgery, Surgery, SurgeryV2
from fusion_bench_featcal.lab.rivals.swudi import SWUDI
from fusion_bench_featcal.results.run import Facts


class MethodAlgorithm(RowsMethod):
    """One method as a FusionBench method, whose keys are its settings.

    Methods that improve a merged model also have `base_method`, the config of the upstream merger,
    by default the pool's `_merged_` model. A subclass names the kind of method.
    """

    kind: ClassVar[type[Method]]

    def __init_subclass__(cls, **options: object) -> None:
        """Take the settings from the kind."""
        cls.setting_kinds = [cls.kind] if hasattr(cls.kind, "merge") else [cls.kind, MergedBy]
        super().__init_subclass__(**options)

    @property
    def rows(self) -> Mapping[str, Method]:
        """The method's row."""
        return {self.kind.name: self.declared[0]}

    def facts(self, row: str, model: nn.Module, tasks: Sequence[str]) -> Facts:
        """Return what the report says. A merger's settings are its config, as in comparisons."""
        facts = super().facts(row, model, tasks)
        config = plain_config(getattr(self._program, "_method", None)) if self.merges else None
        return replace(facts, settings=config) if config else facts


def _algorithm(kind: type[Method]) -> type[MethodAlgorithm]:
    """Return the FusionBench method of a kind."""
    members = {"kind": kind, "__doc__": f"`method={kind.option}`.", "__module__": __name__}
    return type(f"{kind.__name__}Algorithm", (MethodAlgorithm,), members)


DCMergeAlgorithm = _algorithm(DCMerge)
DistillationAlgorithm = _algorithm(Distillation)
ESMAlgorithm = _algorithm(ESM)
HARCAlgorithm = _algorithm(HARC)
LARVAlgorithm = _algorithm(LARV)
LotAlgorithm = _algorithm(Lot)
PolishAlgorithm = _algorithm(Polish)
ProbSurgeryAlgorithm = _algorithm(ProbSurgery)
ReACTAlgorithm = _algorithm(ReACT)
RegMeanAlgorithm = _algorithm(RegMean)
RegMeanPlusPlusAlgorithm = _algorithm(RegMeanPlusPlus)
RidgeSurgeryAlgorithm = _algorithm(RidgeSurgery)
SWUDIAlgorithm = _algorithm(SWUDI)
SurgeryAlgorithm = _algorithm(Surgery)
SurgeryV2Algorithm = _algorithm(SurgeryV2)

ALGORITHMS = {kind.kind.option: kind for kind in MethodAlgorithm.__subclasses__()}
"""`method=<option>` -> its class, of the methods above."""
