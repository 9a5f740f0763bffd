"""Post-merging methods and mergers: one class each, for FusionBench, comparisons and Python."""

from fusion_bench_featcal.lazy import lazy_names

_MODULES = {
    "CorrectedModel": "corrected_model", "DCMerge": "dc_merge",
    "Distillation": "distillation", "ESM": "esm", "HARC": "harc", "Lot": "lot",
    "LARV": "larv", "Polish": "fine_tuning", "ProbSurgery": "surgery", "ReACT": "react",
    "RegMean": "regmean", "RegMeanPlusPlus": "regmean", "RidgeSurgery": "ridge_surgery",
    "SWUDI": "swudi", "Surgery": "surgery", "SurgeryV2": "surgery",
}  # fmt: skip
_ALGORITHMS = [f"{name}Algorithm" for name in ("Method", *_MODULES) if name != "CorrectedModel"]

# FusionBench and torch are slow to import.
__getattr__ = lazy_names(
    __name__,
    {name: f".{module}" for name, module in _MODULES.items()}
    | dict.fromkeys(_ALGORITHMS, ".standalone")
    | dict.fromkeys(
        ("Method", "MethodResult", "SampleSettings"), "fusion_bench_featcal.fusionbench.method"
    )
    | {"FeatCal": "fusion_bench_featcal.fusionbench.featcal"},
)
