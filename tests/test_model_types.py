"""Types of models in the table are found by their structure and calibrated as the oracle does."""

from pathlib import Path

import pytest
import torch
from calibrations import run_fast
from model_types import REFUSED, ROWS, Row, examined
from tiny_models import ROUNDING

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.families import resolve_family, stages_of
from fusion_bench_featcal.modules.sites import find_all_modules
from fusion_bench_featcal.streams import trial

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


def tried(row: Row) -> None:
    """Try the blocks of a row's model on the shapes of its first batch, and without its mask."""
    torch.manual_seed(1)
    model, inputs = row.make()
    family = resolve_family("auto", model)
    stages = stages_of(family, model)
    modules = find_all_modules(model, stages, calibrate_norm=True)
    first = inputs[min(inputs)][0]
    batch = {name: tensor for name, tensor in first.items() if name != "labels"}
    without_mask = {name: tensor for name, tensor in batch.items() if "mask" not in name}
    trial.try_blocks(family, model, stages, modules, [batch, without_mask])


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_a_trial_on_shapes_passes_all_types_in_the_table(monkeypatch):
    compare, compared = trial.compare_with_model, list[str]()

    def noted(family, model, inputs):
        compared.append(type(model).__name__)
        return compare(family, model, inputs)

    monkeypatch.setattr(trial, "compare_with_model", noted)
    for row in ROWS:
        tried(row)
    assert len(compared) > 0.8 * len(ROWS)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
@pytest.mark.parametrize(
    ("row", "message"), [pytest.param(*entry, id=entry[0].name) for entry in REFUSED]
)
def test_a_trial_on_shapes_refuses_types_as_the_calibration_does(row: Row, message: str):
    with pytest.raises(CalibrationError, match=message):
        tried(row)
