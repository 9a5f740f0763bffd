"""FeatCal: repairs merged models by closed-form feature calibration (arXiv 2605.13030)."""

from typing import TYPE_CHECKING

from fusion_bench_featcal.lazy import lazy_names

if TYPE_CHECKING:
    from fusion_bench_featcal.calibration import calibrate as calibrate
    from fusion_bench_featcal.errors import CalibrationError as CalibrationError
    from fusion_bench_featcal.experts import ExpertSource as ExpertSource
    from fusion_bench_featcal.experts import InMemoryExpert as InMemoryExpert
    from fusion_bench_featcal.experts.safetensors_files import (
        SafetensorsExpert as SafetensorsExpert,
    )
    from fusion_bench_featcal.families import Family as Family
    from fusion_bench_featcal.folders import calibrate_folder as calibrate_folder
    from fusion_bench_featcal.folders.calibration_inputs import (
        calibration_inputs as calibration_inputs,
    )
    from fusion_bench_featcal.folders.pushing import push_to_hub as push_to_hub
    from fusion_bench_featcal.rules.paper import Paper as Paper
    from fusion_bench_featcal.rules.plus import Plus as Plus
    from fusion_bench_featcal.run.log import CalibrationLog as CalibrationLog
    from fusion_bench_featcal.run.processes import TorchProcesses as TorchProcesses
    from fusion_bench_featcal.run.result import CalibrationResult as CalibrationResult
    from fusion_bench_featcal.settings import FeatCalSettings as FeatCalSettings

__version__ = "0.2.0"

_MODULES = {
    "CalibrationError": ".errors",
    "CalibrationLog": ".run.log",
    "CalibrationResult": ".run.result",
    "ExpertSource": ".experts",
    "Family": ".families",
    "FeatCalSettings": ".settings",
    "InMemoryExpert": ".experts",
    "Paper": ".rules.paper",
    "Plus": ".rules.plus",
    "SafetensorsExpert": ".experts.safetensors_files",
    "TorchProcesses": ".run.processes",
    "calibrate": ".calibration",
    "calibrate_folder": ".folders",
    "calibration_inputs": ".folders.calibration_inputs",
    "push_to_hub": ".folders.pushing",
}
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]

# Imported on first use, so that `import fusion_bench_featcal` is fast.
__getattr__, __dir__ = lazy_names(__name__, _MODULES)
