"""The output folder of a calibration, which stores finished blocks for resuming.

The code is only imported if `checkpoint_dir` is set.
"""

from pathlib import Path
from typing import Any

from fusion_bench_featcal.lazy import lazy_names
from fusion_bench_featcal.output.in_memory import InMemory
from fusion_bench_featcal.settings import FeatCalSettings

__all__ = ["InMemory", "check_output", "open_output"]

__getattr__ = lazy_names(__name__, {"MANIFEST": ".folder", "OutputFolder": ".folder"})


def open_output(settings: FeatCalSettings, processes: Any) -> InMemory:
    """Open the output folder of the settings.

    Args:
        settings: `checkpoint_dir` and `resume` are used.
        processes: The processes. The first one writes.

    Raises:
        CalibrationError: If it cannot be used.
    """
    if settings.checkpoint_dir is None:
        return InMemory()
    from fusion_bench_featcal.output.folder import OutputFolder

    folder = Path(settings.checkpoint_dir)
    return OutputFolder(folder, resume=settings.resume, processes=processes)


def check_output(settings: FeatCalSettings, processes: Any) -> None:
    """Refuse, before any work, a folder that is unusable with these settings.

    Raises:
        CalibrationError: If it cannot be used, or blocks were finished with other settings.
    """
    output = open_output(settings, processes)
    if settings.checkpoint_dir is not None:
        from fusion_bench_featcal.output.fingerprint import describe_settings

        output.compare({"settings": describe_settings(settings)})
