"""Post-merging methods and mergers: one class each, for FusionBench, comparisons and Python."""

from importlib import import_module
from typing import Any

_MODULES = {
    "Chain": "chain", "CorrectedModel": "corrected_model", "FeatCal": "featcal", "Method": "method",
    "SampleSettings": "method",
}  # fmt: skip
"""Public names that are no option of the command line -> module."""


def __getattr__(name: str) -> Any:
    """Return a method, its FusionBench class `<name>Algorithm`, or another public class."""
    if name.endswith("Algorithm"):
        kind = __getattr__(name.removesuffix("Algorithm"))
        return import_module(f"{__name__}.standalone").algorithm_of(kind)
    if name in _MODULES:  # FusionBench and torch are slow to import
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name[:1].isupper():
        for kind in import_module(f"{__name__}.method").all_methods().values():
            if kind.__name__ == name:
                return kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
