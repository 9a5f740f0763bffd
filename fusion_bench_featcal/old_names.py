"""Dotted paths that configs of earlier versions hold, and the places they lead to today."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

_ROOT = __package__
# Old path below the package -> module of today.
MOVED = {
    "baselines.algorithms.ProbSurgeryAlgorithm": "methods",
    "baselines.algorithms.RidgeSurgeryAlgorithm": "methods",
    "baselines.algorithms.SurgeryAlgorithm": "methods",
    "baselines.language_model.CorrectedLanguageModel": "methods",
    "baselines.layer_corrected.LayerCorrectedModel": "methods",
    "baselines.peer_algorithms.AnchorOnlyAlgorithm": "methods",
    "baselines.peer_algorithms.LotAlgorithm": "methods",
    "baselines.peer_algorithms.RegMeanAlgorithm": "methods",
    "baselines.peer_algorithms.RegMeanPlusPlusAlgorithm": "methods",
    "baselines.surgery_v2_algorithm.SurgeryV2Algorithm": "methods",
    "baselines.wrapper.CorrectedModel": "methods",
    "boundary.log_dir.LogDirectoryCheck": "fusionbench.hydra_job",
    "boundary.console.Console": "fusionbench.console",
}


class _OldPlace(SimpleNamespace):
    """A package or module that is no more; its names are looked up when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        return old_name(f"{self.path}.{name}")


def old_name(path: str) -> Any:
    """Return what a path of an earlier version names.

    Args:
        path: The path below the package, or a beginning of one.

    Raises:
        AttributeError: If there was no such path.
    """
    if path in MOVED:
        return getattr(import_module(f"{_ROOT}.{MOVED[path]}"), path.rpartition(".")[2])
    if any(old.startswith(f"{path}.") for old in MOVED):
        return _OldPlace(path=path)
    raise AttributeError(f"module {_ROOT!r} has no attribute {path!r}")
