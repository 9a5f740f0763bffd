"""Every type of model in the table is found by its structure and calibrated as the oracle does."""

from pathlib import Path

import pytest
from model_types import ROWS, examined
from tiny_models import ROUNDING


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_type_is_found_and_equals_replay_and_the_oracle(row, tmp_path: Path):
    found = examined(row, tmp_path)
    if found is None:
        pytest.skip(f"this release of transformers lacks {row.name}")
    assert found.family == row.family
    assert found.replay_gap == 0
    assert found.oracle_gap < ROUNDING < 0.1 < found.moved
    assert found.reloaded
