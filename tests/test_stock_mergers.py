"""FusionBench's methods as upstream mergers of `method=featcal`, on tiny models."""

from typing import Any

import pytest
from stock_mergers import MERGERS, NAMES, merger_of
from stock_pools.running import run
from stock_pools.stand_ins import StandIns

QUICK = {"ties_merging", "slerp/slerp", "linear/llama_expo", "singular_value_calibration/iso_c"}
# Of FusionBench's methods, which no part of this package raises.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning")
]


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    return StandIns(tmp_path_factory.mktemp("stand_ins"))


def test_every_method_has_an_entry_and_every_entry_a_method() -> None:
    assert len(NAMES) == 114
    assert {merger_of(name).pattern for name in NAMES} == {entry.pattern for entry in MERGERS}


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in NAMES
        if not merger_of(name).why_not
    ],
)
def test_result_of_a_merger_is_calibrated(
    name: str, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stand_ins.root)
    merger = merger_of(name)
    model: Any = run(merger.pool[0], stand_ins, merger.command(name))["merged_model"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
