"""A run's numbers for the Lightning loggers that the user chose (`fabric.loggers`)."""

import warnings
from collections.abc import Iterable
from typing import Any

from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.report import report_scalars


def log_reports(fabric: Any, reports: Iterable[Report]) -> None:
    """Hand all numbers of finished reports to Fabric's loggers; without loggers nothing happens.

    Args:
        fabric: Lightning Fabric.
        reports: Of one run; numbers that several of them have, such as those of references, are
            logged once.
    """
    if not fabric.loggers:
        return
    scalars: dict[str, float] = {}
    for report in reports:
        scalars |= report_scalars(report)
    with warnings.catch_warnings():
        # CSVLogger announces that it deletes what is in its folder, which is the run's own; but all
        # that it would delete is its own `metrics.csv`.
        warnings.filterwarnings("ignore", message="Experiment logs directory")
        fabric.log_dict(scalars, step=0)
    for logger in fabric.loggers:
        # Some keep what is logged until there is much of it.
        logger.save()
