"""The examples run, and show what they are there to show."""

import runpy
from pathlib import Path
from statistics import fmean

from fusion_bench_featcal.suites import image

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_python_api_calibrates_the_bundled_suite():
    table = runpy.run_path(str(EXAMPLES / "python_api.py"))["main"](samples=8, test_images=40)
    assert list(table) == list(image.TA6)
    merged, calibrated = (fmean(row[column] for row in table.values()) for column in (0, 1))
    assert calibrated > merged
