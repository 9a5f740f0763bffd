"""Comparisons, studies, diagnoses and reports, which nothing else of the package imports."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report.load import load, load_notes

__all__ = ["load", "load_notes"]


def __getattr__(name: str) -> Any:
    """Import a public function when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .report import load

    return getattr(load, name)
