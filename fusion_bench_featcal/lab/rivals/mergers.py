"""RegMean, RegMean++ and LOT Merging on the experts and samples of a model pool."""

from fusion_bench_featcal.lab.rivals.blockwise import Merger
from fusion_bench_featcal.lab.rivals.registry import method
from fusion_bench_featcal.rules import lot, regmean


@method("featcal_baselines/regmean", source="Jin et al., ICLR 2023", without=["features"])
class RegMean(regmean.RegMean, Merger):
    """RegMean: linear weights by regression on the experts' features.

    All other parameters are the experts' mean. Same solution as regmean/clip_regmean, for any model
    family.
    """


@method("featcal_baselines/regmean_plusplus", source="Nguyen et al., TMLR 2026")
class RegMeanPlusPlus(RegMean):
    """RegMean++: RegMean block by block, on features of the blocks merged so far.

    Parameters after the last block are the experts' mean, in regmean_plusplus/* the base's.
    """

    features = "merged"


@method("featcal_baselines/lot", source="Sun et al., NeurIPS 2025, arXiv 2505.23859")
class Lot(lot.Lot, Merger):
    """LOT Merging: the task vector that fits all experts best, block by block.

    It is computed by regression on the experts' features. Directions without samples keep the
    base's weights.
    """
