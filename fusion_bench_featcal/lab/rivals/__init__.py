"""Post-merging methods and mergers: one object each, for FusionBench, the grid and users' own."""

from importlib import import_module
from typing import Any

# Public name -> module, beside the registered methods. Loaded on first use: FusionBench is slow
# to import.
_EXPORTS = {
    "AffineModule": "corrected_model",
    "Chain": "interface",
    "CorrectedLanguageModel": "corrected_language_model",
    "CorrectedModel": "corrected_clip",
    "FeatCal": "featcal",
    "LayerCorrectedModel": "corrected_clip",
    "PostMerging": "interface",
    "SurgeryModule": "corrected_model",
    "Tuned": "tuned",
    "TunedMergerAlgorithm": "tuned",
}


def __getattr__(name: str) -> Any:
    """Return a public object, a registered method, or its FusionBench class `<name>Algorithm`."""
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    if name[:1].isupper():
        registry = import_module(f"{__name__}.registry")
        methods = {kind.__name__: kind for kind in registry.all_methods().values()}
        if name in methods:
            return methods[name]
        if (kind := methods.get(name.removesuffix("Algorithm"))) is not None:
            return import_module(f"{__name__}.standalone").algorithm_of(kind)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
