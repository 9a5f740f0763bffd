"""Types of models in the table are found by their structure and calibrated as the oracle does."""

from pathlib import Path

import pytest
from model_types import ROWS, Row, examined
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import ROUNDING

IN_CI = [pytest.mark.slow, pytest.mark.ci]
# Its routed experts have no float64 in release 4.
OF_RELEASE = {"deepseek_v3": [NEEDS_RELEASE_5]}
TABLE = [
    pytest.param(
        row,
        id=f"{row.name}-{row.kind}",
        marks=[*IN_CI[: 2 - row.slow], *OF_RELEASE.get(row.name, ())],
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
