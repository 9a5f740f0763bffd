"""Results: functions to write, read, join, compare and draw them. No models.

A run writes lines, and everything else reads lines: `Run` is one command's rows, `write_run` and
`read_run` are its files, `load` joins any number of them into one table, and `frame_of` makes
the frame of which every view is a part. Functions raise `ReportError` for wrong files and values,
naming location and cause. Their argument `setting` is the setting that chose the folder.
"""

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.files import prepare_directory

from .columns import AVERAGE
from .cost import Cost, describe_device, measure, versions
from .frame import Frame, frame_of, summary
from .joining import Results, join
from .lines import join_folders, load, read_run, write_run
from .notes import Note
from .run import ACCURACY, BASE, EXPERTS, FEATCAL, Line, Row, Run
from .show import against

__all__ = [
    "ACCURACY",
    "AVERAGE",
    "BASE",
    "EXPERTS",
    "FEATCAL",
    "Cost",
    "Frame",
    "Line",
    "Note",
    "ReportError",
    "Results",
    "Row",
    "Run",
    "against",
    "describe_device",
    "frame_of",
    "join",
    "join_folders",
    "load",
    "measure",
    "prepare_directory",
    "read_run",
    "summary",
    "versions",
    "write_run",
]
