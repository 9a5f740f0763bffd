"""Types of models in the table are found by their structure and calibrated as the oracle does."""

from pathlib import Path

import pytest
from calibrations import run_fast
from model_types import REFUSED, ROWS, Row, examined
from tiny_models import ROUNDING

from fusion_bench_featcal import CalibrationError

IN_CI = [pytest.mark.slow, pytest.mark.ci]
TABLE = [pytest.param(row, id=row.name, marks=IN_CI[: 2 - row.slow]) for row in ROWS]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize("row", TABLE)
def test_type_is_found_and_equals_the_oracle(row: Row, tmp_path: Path):
    result = examined(row, tmp_path)
    assert result.family == row.family
    assert result.oracle_gap < ROUNDING < 0.1 < result.moved
    assert result.reloaded


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize(
    ("row", "message"), [pytest.param(*entry, id=entry[0].name) for entry in REFUSED]
)
def test_types_whose_blocks_do_more_than_a_stack_are_refused_by_name(row: Row, message: str):
    with pytest.raises(CalibrationError, match=message):
        run_fast(row.suite())
