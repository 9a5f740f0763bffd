"""Results: functions to write, read, join, compare and draw them. No models.

`Run` has the models of one command, `write_run` and `read_run` are its files, `load` joins any
number of runs into one long table, and `frame_of` makes the frame that every view shows. Functions
raise `ReportError` for wrong files and values, naming location and cause. Their argument `setting`
is the setting that chose the folder.
"""

from fusion_bench_featcal.errors import ReportError as ReportError
from fusion_bench_featcal.files import prepare_directory as prepare_directory

from .against import against as against
from .columns import AVERAGE as AVERAGE
from .cost import Cost as Cost
from .cost import describe_device as describe_device
from .cost import measure as measure
from .cost import versions as versions
from .frame import Frame as Frame
from .frame import accuracy_frame as accuracy_frame
from .frame import frame_of as frame_of
from .frame import summary as summary
from .joining import Results as Results
from .joining import join as join
from .lines import join_folders as join_folders
from .lines import load as load
from .lines import read_run as read_run
from .lines import write_run as write_run
from .names import ACCURACY as ACCURACY
from .names import BASE as BASE
from .names import EXPERTS as EXPERTS
from .names import FEATCAL as FEATCAL
from .notes import Note as Note
from .rows import Line as Line
from .rows import Row as Row
from .run import Run as Run
