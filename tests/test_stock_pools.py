"""FusionBench's stock pools and methods with `method=featcal`, on tiny stand-ins for downloads."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from stock_pools.expected import EXPECTED, RUNS, expected_of
from stock_pools.mergers import Merger, command, methods
from stock_pools.running import NAMES, run
from stock_pools.stand_ins import StandIns

slow = pytest.mark.slow
# Of FusionBench's methods and PEFT, which no part of this package raises.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning")
]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIns]:
    """Stand-ins in the current folder, where FusionBench's GLUE loaders keep their tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("stand_ins"))
        yield StandIns(folder)


@pytest.mark.parametrize(
    ("name", "merger"),
    [pytest.param(name, entry, id=name, marks=[slow] * (name not in entry.quick))
     for name, entry in methods()],
)  # fmt: skip
def test_result_of_a_merger_is_calibrated(name: str, merger: Merger, stand_ins: StandIns) -> None:
    model: Any = run(merger.pool[0], stand_ins, command(name, merger))["merged_model"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_every_pool_has_an_entry_and_every_entry_a_pool() -> None:
    assert len(NAMES) == 154
    assert {entry.pattern for entry in EXPECTED} == {expected_of(name).pattern for name in NAMES}


CASES = [(name, (), expected_of(name).refused) for name in NAMES]
CASES += [(n, e.words_of(n), e.then) for n in NAMES if (e := expected_of(n)).words]


@slow
@pytest.mark.parametrize(("name", "words", "refused"), CASES)
def test_pool_runs_or_is_refused_by_its_cause(
    name: str, words: Sequence[str], refused: str, stand_ins: StandIns
) -> None:
    if refused != RUNS:
        with pytest.raises(Exception, match=refused):
            run(name, stand_ins, words)
        return
    model = run(name, stand_ins, words)["merged_model"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
