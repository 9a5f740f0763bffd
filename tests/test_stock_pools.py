"""FusionBench's stock pools with `method=featcal`, on tiny stand-ins for what they download."""

import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from stock_pools.expected import EXPECTED, RUNS, expected_of, line_of
from stock_pools.running import NAMES, as_hydra_job, composed, redirected, run
from stock_pools.stand_ins import StandIns

LAST = {expected_of(name).pattern: name for name in NAMES}
pytestmark = pytest.mark.filterwarnings(
    "ignore:ModelPoolFactory.create_modelpool:DeprecationWarning",
)


def marked(names: Sequence[str]) -> list[Any]:
    """Mark all but one config of each kind as slow: they take minutes together."""
    slow = pytest.mark.slow
    return [
        name if name == LAST[expected_of(name).pattern] else pytest.param(name, marks=slow)
        for name in names
    ]


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    return StandIns(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture(autouse=True)
def own_folder(stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> None:
    # One for all: FusionBench's GLUE loaders keep their tables in the current folder.
    monkeypatch.chdir(stand_ins.root)


def test_there_are_154_and_each_expectation_is_met_by_some() -> None:
    assert len(NAMES) == 154
    assert {entry.pattern for entry in EXPECTED} == {expected_of(name).pattern for name in NAMES}


def check(name: str, stand_ins: StandIns, words: Sequence[str], refused: str) -> None:
    """Run a pool; check that it is refused in one line where that is expected."""
    if refused == RUNS:
        model = run(name, stand_ins, words)["merged_model"]
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return
    with pytest.raises(Exception) as caught:
        run(name, stand_ins, words)
    line = line_of(caught.value)
    assert re.search(refused, line), line
    assert "\n" not in line
    assert len(line) < 500


@pytest.mark.parametrize("name", marked(NAMES))
def test_pool_as_it_is_runs_or_is_refused_before_loading(
    name: str, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = expected_of(name).refused
    if refused != RUNS:
        with suppress(Exception):  # some do not compose
            config = composed(name)
            with as_hydra_job(config):
                redirected(config, stand_ins)  # loads bases of LoRA stand-ins

        def load(*_: Any, **__: Any) -> None:
            raise AssertionError("a model was loaded")

        monkeypatch.setattr(PreTrainedModel, "from_pretrained", load)
    check(name, stand_ins, (), refused)


@pytest.mark.parametrize("name", marked([name for name in NAMES if expected_of(name).words]))
def test_pool_with_what_it_lacks_runs_or_is_refused(name: str, stand_ins: StandIns) -> None:
    expected = expected_of(name)
    check(name, stand_ins, expected.words_of(name), expected.then)
