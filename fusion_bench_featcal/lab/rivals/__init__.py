"""Post-merging methods and mergers: one class each, for FusionBench, comparisons and Python."""

from importlib import import_module
from typing import Any

from fusion_bench_featcal.lazy import lazy_names

# Names in addition to the registered methods. FusionBench is slow to import.
_EXPORTS = {
    "AffineModule": ".corrected_model",
    "CorrectedModel": ".corrected_model",
    "FeatCal": ".featcal",
    "LayerSurgery": ".corrected_model",
    "PostMerging": ".interface",
    "SurgeryModule": ".corrected_model",
}
_get_name = lazy_names(__name__, _EXPORTS)


def __getattr__(name: str) -> Any:
    """Return a public object, a registered method, or its FusionBench class `<name>Algorithm`."""
    if name in _EXPORTS:
        return _get_name(name)
    if name.endswith("Algorithm"):
        kind = __getattr__(name.removesuffix("Algorithm"))
        return import_module(f"{__name__}.standalone").algorithm_of(kind)
    if name[:1].isupper():
        for kind in import_module(f"{__name__}.registry").all_methods().values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
