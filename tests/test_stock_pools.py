"""FusionBench's stock pools with `method=featcal`, on tiny stand-ins for what they download."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from stock_pools.expected import EXPECTED, RUNS, expected_of, line_of
from stock_pools.running import NAMES, as_hydra_job, composed, redirected, run
from stock_pools.stand_ins import StandIns
from transformers import PreTrainedModel

LAST = {expected_of(name).pattern: name for name in NAMES}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:ModelPoolFactory.create_modelpool:DeprecationWarning",
        "ignore:`is_gradient_checkpointing`:FutureWarning",  # PEFT asks transformers 5 for it
        "ignore:Input and output embeddings are no longer tied:UserWarning",  # says PEFT
    ),
]


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


def rows_of(name: str, stand_ins: StandIns, *words: str) -> dict[str, Any]:
    """Accuracies by row and task of a run with a task pool."""
    run(name, stand_ins, [*words, "method.compare_with=[base,merged]"])
    return json.loads((stand_ins.root / "report.json").read_text())["rows"]


def test_glue_task_pool_evaluates_every_row_of_gpt2(stand_ins: StandIns) -> None:
    words = expected_of("gpt-2_glue").words
    rows = rows_of("gpt-2_glue", stand_ins, *words, "taskpool=gpt-2_glue")
    assert list(rows) == ["base", "task_arithmetic", "featcal"]
    assert all(set(row) >= {"cola", "mnli", "sst2"} for row in rows.values())


def test_image_task_pool_evaluates_every_row_of_classifiers(stand_ins: StandIns) -> None:
    name = "Dinov2ForImageClassification/dinov2-base-imagenet1k-1-layer"
    taskpool = "ImageClassificationTaskPool/convnext-base-224_8-tasks"
    others = ("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "dtd")
    words = (
        "+modelpool.models.mnist={config_path: some/dinov2-expert}",
        "DATA",
        *expected_of(name).words[2:],
        f"taskpool={taskpool}",
        *(f"~taskpool.test_datasets.{task}" for task in others),
    )
    rows = rows_of(name, stand_ins, *words)
    assert list(rows) == ["base", "task_arithmetic", "featcal"]
    assert all(set(row) == {"mnist", "average"} for row in rows.values())
