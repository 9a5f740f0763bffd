"""Post-merging methods and mergers: one class each, for FusionBench, comparisons and Python."""

from fusion_bench_featcal.lazy import lazy_names

_MODULES = {
    "CorrectedModel": "corrected_model", "DCMerge": "dc_merge",
    "Distillation": "distillation", "ESM": "esm", "HARC": "harc", "LARV": "larv",
    "Lot": "lot", "MOPD": "answer_training", "Polish": "fine_tuning", "ProbSurgery": "surgery",
    "ReACT": "react", "RegMean": "regmean", "RegMeanPlusPlus": "regmean",
    "RidgeSurgery": "ridge_surgery", "SWUDI": "swudi", "SeqKD": "answer_training",
    "Surgery": "surgery", "SurgeryV2": "surgery",
}  # fmt: skip
METHODS = [name for name in _MODULES if name != "CorrectedModel"]
_ALGORITHMS = [f"{name}Algorithm" for name in ("Method", *METHODS)]

# FusionBench and torch are slow to import.
__getattr__, __dir__ = lazy_names(
    __name__,
    {name: f".{module}" for name, module in _MODULES.items()}
    | dict.fromkeys(_ALGORITHMS, ".standalone")
    | dict.fromkeys(
        ("Method", "MethodResult", "SampleSettings"), "fusion_bench_featcal.fusionbench.method"
    )
    | {"FeatCal": "fusion_bench_featcal.fusionbench.featcal"},
)
