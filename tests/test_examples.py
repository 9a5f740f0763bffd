"""The example of the Python API runs."""

import runpy
from pathlib import Path
from statistics import fmean

from fusion_bench_featcal.suites import image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_python_api_calibrates_the_bundled_suite():
    main, tasks = runpy.run_path(str(EXAMPLES / "python_api.py"))["main"], image.TA6[:2]
    main.__globals__["TASKS"] = tasks  # two of six, for the sake of time
    table = main(samples=2, test_images=30)
    assert list(table) == list(tasks)
    merged, calibrated = (fmean(row[column] for row in table.values()) for column in (0, 1))
    assert calibrated > merged
