"""`featcal calibrate`: models and data in folders, without FusionBench and without Hydra."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion_bench_featcal.folders.run import calibrate_folder

__all__ = ["calibrate_folder"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line reads its options here, without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fusion_bench_featcal.folders.run import calibrate_folder

    return calibrate_folder
