"""Results: functions to write, read, compare and draw them. No models.

Functions raise `ReportError` for wrong files and values, naming location and cause. Their argument
`setting` is the setting that chose the folder, for that message.
"""

from fusion_bench_featcal.files import ReportError, prepare_directory

from .cost import Cost, describe_device, measure, versions
from .items import load_items, save_items
from .long_table import AVERAGE, BASE, EXPERTS, FEATCAL, UNAVAILABLE
from .report import Report
from .tables import console

__all__ = [
    "AVERAGE",
    "BASE",
    "EXPERTS",
    "FEATCAL",
    "UNAVAILABLE",
    "Cost",
    "Report",
    "ReportError",
    "console",
    "describe_device",
    "load_items",
    "measure",
    "prepare_directory",
    "save_items",
    "versions",
]
