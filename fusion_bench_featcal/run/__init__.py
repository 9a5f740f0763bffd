"""One calibration: its models and samples, processes, finished blocks and log."""

from fusion_bench_featcal.lazy import lazy_names

__getattr__ = lazy_names(
    __name__,
    {
        "CalibrationLog": ".log",
        "CalibrationResult": ".problem",
        "CheckpointFolder": ".checkpoint",
        "Problem": ".problem",
        "Processes": ".processes",
        "TorchProcesses": ".processes",
        "open_problem": ".problem",
        "own_code": ".digests",
        "progress_bar": ".progress",
        "versions_of_software": ".digests",
    },
)
