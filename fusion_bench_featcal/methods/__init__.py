"""Post-merging methods and mergers: one object each, for FusionBench, the grid and users' own."""

from importlib import import_module
from typing import Any

# Public name -> module. Loaded on first use: most need FusionBench, which is slow to import.
_MODULES = {
    "anchor_only": ["AnchorOnly"],
    "corrected_clip": ["CorrectedModel", "LayerCorrectedModel"],
    "corrected_language_model": ["CorrectedLanguageModel"],
    "corrected_model": ["AffineModule", "SurgeryModule"],
    "featcal": ["FeatCal"],
    "feature_correction": ["check_post_merging", "post_merge"],
    "interface": ["Chain", "MethodInputs", "PostMerging"],
    "mergers": ["Lot", "RegMean", "RegMeanPlusPlus"],
    "prob_surgery": ["ProbSurgery", "ProbSurgerySettings", "train_prob_surgery"],
    "ridge_surgery": ["RidgeSurgery", "RidgeSurgerySettings", "fit_ridge_surgery"],
    "standalone": [
        "AnchorOnlyAlgorithm",
        "LotAlgorithm",
        "ProbSurgeryAlgorithm",
        "RegMeanAlgorithm",
        "RegMeanPlusPlusAlgorithm",
        "RidgeSurgeryAlgorithm",
        "SurgeryAlgorithm",
        "SurgeryV2Algorithm",
    ],
    "surgery": ["Surgery", "SurgerySettings", "train_surgery"],
    "surgery_v2": ["SurgeryV2", "train_surgery_v2"],
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
