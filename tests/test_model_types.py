"""Types of models in the table are found by their structure and calibrated as the oracle does."""

from pathlib import Path

import pytest
from mixture_types import plus_gap, slots_gap
from model_types import LAYOUTS, ROWS, Row, examined
from tiny_languages import NEEDS_RELEASE_5, TOWERS_OF_RELEASE_5
from tiny_models import ROUNDING

IN_CI = [pytest.mark.slow, pytest.mark.ci]
# Types that release 4 lacks or has in part, or that have no float64 there.
RELEASE_5_TYPES = {
    name: [NEEDS_RELEASE_5]
    for name in ("deepseek_v3", "glm4_moe", "qwen3_5_text", "gemma4_text", "trocr",
                 *TOWERS_OF_RELEASE_5, *LAYOUTS)
}  # fmt: skip
TABLE = [
    pytest.param(
        row,
        id=f"{row.name}-{row.kind}",
        marks=[*IN_CI[: 2 - row.slow], *RELEASE_5_TYPES.get(row.name, ())],
    )
    for row in ROWS
]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize("row", TABLE)
def test_type_is_found_and_equals_the_oracle(row: Row, tmp_path: Path):
    result = examined(row, tmp_path)
    assert result.family == row.family
    assert result.oracle_gap < ROUNDING < 0.1 < result.moved
    assert result.reloaded


@NEEDS_RELEASE_5
@pytest.mark.parametrize("row", [case for case in TABLE if str(case.id).endswith("-mixture")])
def test_mixture_is_its_slots_and_equals_the_oracle_of_plus(row: Row):
    suite = row.suite()
    assert slots_gap(suite) < ROUNDING
    assert plus_gap(suite) < ROUNDING
