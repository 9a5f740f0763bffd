"""Earlier names of `fusion_bench_featcal.methods`, which stand in users' YAML files and scripts."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_EARLIER = {
    "algorithms": "methods.standalone",
    "anchor_only": "methods.anchor_only",
    "language_model": "methods.corrected_language_model",
    "layer_corrected": "methods.corrected_clip",
    "peer_algorithms": "methods.standalone",
    "post_merging": "methods.feature_correction",
    "prob_surgery": "methods.prob_surgery",
    "ridge_surgery": "methods.ridge_surgery",
    "settings": "methods",
    "surgery": "methods.surgery",
    "surgery_v2": "methods.surgery_v2",
    "surgery_v2_algorithm": "methods.standalone",
    "wrapper": "methods.corrected_clip",
}


def _alias(name: str, place: str) -> ModuleType:
    """A module of an earlier name, whose attributes are looked up when they are asked for."""

    def lookup(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return getattr(import_module(f"fusion_bench_featcal.{place}"), attribute)

    module = ModuleType(f"{__name__}.{name}", f"Earlier name of `fusion_bench_featcal.{place}`.")
    module.__getattr__ = lookup  # type: ignore[method-assign]
    sys.modules[module.__name__] = module
    return module


globals().update({name: _alias(name, place) for name, place in _EARLIER.items()})
