"""FusionBench's stock pools and methods with `method=featcal`, on tiny stand-ins for downloads."""

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from stock_mergers import MERGERS, merger_of
from stock_mergers import NAMES as METHODS
from stock_pools.expected import EXPECTED, RUNS, expected_of, line_of
from stock_pools.running import NAMES, as_hydra_job, composed, redirected, run
from stock_pools.stand_ins import StandIns
from transformers import PreTrainedModel

slow = pytest.mark.slow
QUICK = {"ties_merging", "linear/llama_expo"}
WORKING = [name for name in METHODS if not merger_of(name).why_not]
# Of FusionBench's methods and PEFT, which no part of this package raises.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}")
    for kind in ("DeprecationWarning", "FutureWarning", "UserWarning", "ResourceWarning")
]


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> StandIns:
    return StandIns(tmp_path_factory.mktemp("stand_ins"))


@pytest.fixture(autouse=True)
def own_folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # One for all: FusionBench's GLUE loaders keep their tables in the current folder.
    if "stand_ins" in request.fixturenames:
        monkeypatch.chdir(request.getfixturevalue("stand_ins").root)


def test_every_config_has_an_entry_and_every_entry_a_config() -> None:
    assert (len(NAMES), len(METHODS)) == (154, 114)
    assert {entry.pattern for entry in EXPECTED} == {expected_of(name).pattern for name in NAMES}
    assert {entry.pattern for entry in MERGERS} == {merger_of(name).pattern for name in METHODS}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=slow) for name in WORKING]
)
def test_result_of_a_merger_is_calibrated(name: str, stand_ins: StandIns) -> None:
    merger = merger_of(name)
    model: Any = run(merger.pool[0], stand_ins, merger.command(name))["merged_model"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def check(name: str, stand_ins: StandIns, words: Sequence[str], refused: str) -> None:
    """Run a pool and check that it is refused in one line if that is expected."""
    if refused == RUNS:
        model = run(name, stand_ins, words)["merged_model"]
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        return
    with pytest.raises(Exception) as caught:
        run(name, stand_ins, words)
    line = line_of(caught.value)
    assert re.search(refused, line), line
    assert "\n" not in line and len(line) < 500


@slow
@pytest.mark.parametrize("name", NAMES)
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


@slow
@pytest.mark.parametrize("name", [name for name in NAMES if expected_of(name).words])
def test_pool_with_its_missing_parts_runs_or_is_refused(name: str, stand_ins: StandIns) -> None:
    expected = expected_of(name)
    check(name, stand_ins, expected.words_of(name), expected.then)
