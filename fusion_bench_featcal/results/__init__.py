"""Results: functions to write, read, compare and draw them. No models.

Functions raise `ReportError` for wrong files and values, naming location and cause. Their argument
`setting` is the setting that chose the folder, for that message.
"""

from fusion_bench_featcal.files import ReportError, prepare_directory

from .cost import Cost, describe_device, measure, versions
from .items import load_items, save_items
from .long_table import (
    AVERAGE,
    BASE,
    DIMENSIONS,
    EXPERTS,
    FEATCAL,
    LINES_FILE,
    UNAVAILABLE,
    Line,
    means,
    read_lines,
    where,
    write_lines,
)
from .provenance import Provenance
from .remarks import closing_lines, tasks_below_merged
from .report import Report
from .tables import console

__all__ = [
    "AVERAGE",
    "BASE",
    "DIMENSIONS",
    "EXPERTS",
    "FEATCAL",
    "LINES_FILE",
    "UNAVAILABLE",
    "Cost",
    "Line",
    "Provenance",
    "Report",
    "ReportError",
    "closing_lines",
    "console",
    "describe_device",
    "load_items",
    "means",
    "measure",
    "prepare_directory",
    "read_lines",
    "save_items",
    "tasks_below_merged",
    "versions",
    "where",
    "write_lines",
]
