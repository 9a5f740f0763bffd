"""Files of the package that the simplest calibration enters, without optional ones."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from calibrations import samples_in
from tiny_models import clip_suite

import fusion_bench_featcal
from fusion_bench_featcal import FeatCalSettings, calibrate

ROOT = str(Path(fusion_bench_featcal.__file__).parent)

PAPER = """
calibration.py core/finite.py core/float32_products.py core/kernels.py core/linear.py
core/moments.py core/products.py core/solve.py experts/__init__.py experts/copies.py
experts/budget.py experts/expert.py experts/model_config.py experts/source.py
experts/vocabulary.py experts/working_model.py
families/__init__.py families/base.py families/check.py families/open_clip.py families/stack.py
modules/groups.py modules/hooks.py modules/kinds.py modules/models.py
modules/sites.py
rules/__init__.py rules/norms.py rules/paper.py rules/rule.py rules/targets.py
streams/augmentation.py streams/batch.py streams/checks.py streams/drift.py streams/inputs.py
streams/samples.py streams/statistics.py streams/storage.py streams/streams.py
streams/task_rows.py
run/checkpoint.py run/digests.py run/log.py run/memory.py run/problem.py run/processes.py
run/progress.py
"""


def entered(**settings: Any) -> set[str]:
    """Files of which a calibration without any option calls a function."""
    suite, files = clip_suite(tasks=2), set[str]()
    chosen = FeatCalSettings(samples_per_task=samples_in(suite), **settings)

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    sys.setprofile(note)
    try:
        calibrate(suite.merged, suite.base, suite.experts, suite.inputs, chosen, progress=False)
    finally:
        sys.setprofile(None)
    return files


def test_simplest_calibration_enters_nothing_optional() -> None:
    entered()  # imports and caches
    assert entered() <= set(PAPER.split())
