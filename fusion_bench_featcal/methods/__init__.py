"""Post-merging methods and mergers: one object each, for FusionBench, the grid and users' own."""

from importlib import import_module
from typing import Any

# Public name -> module. Loaded on first use: most need FusionBench, which is slow to import.
_MODULES = {
    "anchor_only": ["AnchorOnly"],
    "batch_norm": ["BatchNormStatistics"],
    "corrected_clip": ["CorrectedModel", "LayerCorrectedModel"],
    "corrected_language_model": ["CorrectedLanguageModel"],
    "corrected_model": ["AffineModule", "SurgeryModule"],
    "distillation": ["Distillation"],
    "featcal": ["FeatCal"],
    "interface": ["Chain", "MethodInputs", "PostMerging"],
    "mergers": ["Lot", "ProDistill", "RegMean", "RegMeanPlusPlus"],
    "prob_surgery": ["ProbSurgery"],
    "ridge_surgery": ["RidgeSurgery"],
    "standalone": [
        "AnchorOnlyAlgorithm",
        "BatchNormStatisticsAlgorithm",
        "DistillationAlgorithm",
        "LotAlgorithm",
        "ProDistillAlgorithm",
        "ProbSurgeryAlgorithm",
        "RegMeanAlgorithm",
        "RegMeanPlusPlusAlgorithm",
        "RidgeSurgeryAlgorithm",
        "SurgeryAlgorithm",
        "SurgeryV2Algorithm",
    ],
    "surgery": ["Surgery"],
    "surgery_v2": ["SurgeryV2"],
    "tuned": ["Tuned", "TunedMergerAlgorithm"],
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
