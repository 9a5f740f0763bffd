"""A calibration in several processes is that of one: the same model, log and output folder."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import PLUS as PLUS_ON_PLAIN
from calibrations import (
    Overheard,
    assert_identical,
    assert_same,
    distance,
    run_fast,
    samples_in,
)
from cli_runs import fusion_bench
from killing import finished_blocks
from mixture_types import mixture_suite
from model_types import suite_named
from process_group import in_processes
from tiny_convs import tower_suite
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite, clip_suite, partly_labelled_suite, t5_suite
from transformers import CLIPVisionModel
from variations import backwards, changed, models_of

from fusion_bench_featcal import CalibrationError, CalibrationResult, Paper, Plus, TorchProcesses
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.errors import LostProcessError
from fusion_bench_featcal.fusionbench.program_processes import share_model
from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.run.checkpoint import CheckpointFolder

PAPER, PLUS = Paper(), Plus()


def together(suite: Suite, size: int, **more: Any) -> list[Any]:
    """The result or error of each process."""
    return in_processes(size, lambda processes: run_fast(suite, processes=processes, **more))


def records(result: CalibrationResult) -> list[dict[str, Any]]:
    """The log without times."""
    return [{k: v for k, v in r.items() if k != "seconds"} for r in result.log.records]


def assert_one_model(results: list[CalibrationResult]) -> None:
    """All processes end with the same bits."""
    for result in results[1:]:
        assert records(result) == records(results[0])
        assert_identical(result.model, results[0].model)


# Three processes, copies, and stages with padding.
CASES: dict[str, tuple[Callable[[], Suite], int, Any, dict[str, Any]]] = {
    "three processes": (clip_suite, 3, PLUS, {}),
    "copies": (lambda: clip_suite(tasks=2), 2, PAPER, {"augment": "jitter"}),
    "statistics": (lambda: tower_suite("resnet"), 2, PAPER, {}),
}


@NEEDS_RELEASE_5
@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("rule", [PAPER, PLUS], ids=["paper", "plus"])
def test_processes_share_the_tokens_of_a_routed_expert(rule: Any):
    """Also those that no token of one process reaches, and those that none reaches."""
    suite = mixture_suite("qwen3_moe", ([6, 7],), ([5, 3],), ([2],), slots=20)
    settings: dict[str, Any] = {"samples_per_task": 2, "rule": rule}
    expected = run_fast(suite, **settings)
    assert all(0 < record["idle"] < 20 for record in expected.log.select("slots"))
    for size in (2, 3):
        results = together(suite, size, **settings)
        assert_one_model(results)
        assert_same(results[0].model, expected.model, 1e-11)
        assert [r["idle"] for r in records(results[0]) if r["kind"] == "slots"] == [
            r["idle"] for r in records(expected) if r["kind"] == "slots"
        ]


@pytest.mark.parametrize("case", CASES)
def test_model_and_log_are_those_of_one_process(case: str):
    make, size, rule, more = CASES[case]
    suite = make()
    settings: dict[str, Any] = {"samples_per_task": samples_in(suite), "rule": rule, **more}
    expected = run_fast(suite, **settings)
    results = together(suite, size, **settings)
    assert_one_model(results)
    # Other sizes of batches alone change what Plus solves in one process by 3e-12.
    assert_same(results[0].model, expected.model, 1e-11 if rule is PLUS else 1e-12)
    for record, other in zip(records(results[0]), records(expected), strict=True):
        assert list(record) == list(other)
        numbers = {k: v for k, v in other.items() if isinstance(v, float)}
        assert {k: record[k] for k in numbers} == pytest.approx(numbers, rel=1e-6, abs=1e-6)
        assert {**record, **numbers} == other


def third(suite: Suite) -> Suite:
    """The suite with a third task: the first one's expert on the second one's samples."""
    experts = suite.experts | {"task_2": suite.experts["task_0"]}
    return replace(suite, experts=experts, inputs=suite.inputs | {"task_2": suite.inputs["task_1"]})


def short_first(name: str = "bert", **config: Any) -> Suite:
    """Text classifiers whose first task begins with texts of one token."""
    suite = suite_named(name)
    for model in models_of(suite):
        vars(model.config).update(config)
    suite.inputs["task_0"][0]["attention_mask"][:, 1:] = 0
    return suite


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("make", "narrowed"), [
    (lambda: partly_labelled_suite("none", 3), [False, True, True]),
    (lambda: partly_labelled_suite("every", 1), [False, True, True]),
    (lambda: third(short_first()), [True, True, True]),
])  # fmt: skip
def test_neither_processes_nor_their_first_tasks_decide_what_counts(make, narrowed) -> None:
    auto: dict[str, Any] = PLUS_ON_PLAIN | {"decoder_rows": "auto"}
    suite = make()
    expected = run_fast(suite, **auto)
    tokens = [sum(b["attention_mask"].sum() for b in bs) for bs in suite.inputs.values()]
    rows = [record["rows"] for record in expected.log.select("task")]
    assert rows[: len(tokens)] == tokens
    # In the last block only targets count, or the first token of a classifier.
    last = zip(rows[-len(tokens) :], tokens, strict=True)
    assert [n < total for n, total in last] == narrowed
    others = [run_fast(backwards(suite), **auto)]
    for size in (2, 3):
        results = together(suite, size, **auto)
        assert_one_model(results)
        others.append(results[0])
    for other in others:
        assert_same(other.model, expected.model, 1e-9)


# The second model averages its tokens, which texts of one token do not show.
@pytest.mark.parametrize("of", [("bert", {}), ("modernbert", {"classifier_pooling": "mean"})])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_short_texts_in_the_first_batch_do_not_decide_what_feeds_the_head(of: Any):
    suite = short_first(of[0], **of[1])
    rule: Any = Plus(ridges=(1e-2,))  # no sample is held out by its number
    last = changed(suite, lambda batches: batches[::-1])
    first, other = (run_fast(each, **PLUS_ON_PLAIN | {"rule": rule}) for each in (suite, last))
    assert_same(other.model, first.model, 1e-6)  # some norms are computed in float32


def test_each_process_reads_the_experts_of_its_tasks():
    suite = clip_suite(tasks=4)

    def work(processes: TorchProcesses) -> list[str]:
        experts: Any = {task: Overheard(expert) for task, expert in suite.experts.items()}
        run_fast(replace(suite, experts=experts), processes=processes, rule=PLUS)
        return [task for task, expert in experts.items() if expert.read]

    assert in_processes(2, work) == [["task_0", "task_2"], ["task_1", "task_3"]]


def test_a_model_with_functions_of_its_loader_is_not_sent_but_named():
    """FusionBench's loaders of image classifiers set `forward` on the model."""
    model = clip_suite(tasks=1).base
    model.forward = lambda *args: args  # type: ignore[method-assign]

    def work(processes: TorchProcesses) -> None:
        share_model(model if processes.rank == 0 else None, processes, torch.device("cpu"))

    first, _ = in_processes(2, work)
    assert re.search("CLIPVisionModel.*loader has set functions.*fabric.devices=1", str(first))


def test_a_process_that_fails_names_the_cause_and_ends_the_other(tmp_path: Path):
    def work(processes: TorchProcesses) -> Any:
        suite = clip_suite(tasks=2)
        suite.inputs["task_1"][-1]["pixel_values"][0] = float("nan")
        return run_fast(suite, processes=processes, checkpoint_dir=str(tmp_path / "blocks"))

    other, error = in_processes(2, work)
    assert re.search(r"task task_1: sample \d+, input 'pixel_values', has NaN", str(error))
    assert isinstance(other, LostProcessError) and not list(tmp_path.rglob("*.part"))


def failing_after(
    suite: Suite, rank: int, folder: Path, fault: Callable[[], None], *, blocks: int = 1
) -> Any:
    """A calibration in which the process of a rank has a fault after some blocks."""
    write, written = CheckpointFolder.save_block, []

    def work(processes: TorchProcesses) -> Any:
        def writing(self: CheckpointFolder, block: str, *rest: Any) -> Any:
            if len(written) == blocks and processes.rank == rank:
                fault()
            written.append(block)
            return write(self, block, *rest)

        setattr(CheckpointFolder, "save_block", writing)  # noqa: B010 - a method is not for assigning to
        return run_fast(suite, processes=processes, checkpoint_dir=str(folder))

    return work


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_process_ends_the_others_and_a_resumed_run_has_the_same_bits(tmp_path: Path):
    suite = t5_suite(depths=(1, 2))
    expected = together(suite, 2)
    survivor, dead = in_processes(2, failing_after(suite, 1, tmp_path, die))
    assert dead == -signal.SIGKILL
    assert isinstance(survivor, LostProcessError)
    assert re.search(r"process 0 of 2 has lost contact .* resume=true", str(survivor))
    written = 2  # the first process writes, and has not missed the other one yet
    assert finished_blocks(tmp_path) == written
    results = together(suite, 2, checkpoint_dir=str(tmp_path), resume=True)
    assert_one_model(expected)
    assert_one_model(results)
    assert_identical(results[0].model, expected[0].model)
    assert results[0].log.records.pop()["blocks"] == written
    assert records(results[0]) == records(expected[0])


# --- at the door of pools ---


@pytest.mark.slow
def test_the_command_leaves_one_model_and_one_report(tmp_path: Path) -> None:
    words = (
        "method=featcal", "modelpool=clip-vit-mini_alphabets2", "fabric.accelerator=cpu",
        "print_config=false", "method.compare_with=[]", "method.presets={}",
        "method.samples_per_task=8", 'merged_model_save_path="{log_dir}/model"',
    )  # fmt: skip
    saved: list[CLIPVisionModel] = []
    for devices in (1, 2):
        log_dir = tmp_path / f"log{devices}"
        more = [f"fabric.devices={devices}", f"path.log_dir={log_dir}"]
        done = fusion_bench([*words, *more], tmp_path)
        saved.append(CLIPVisionModel.from_pretrained(log_dir / "model"))
    assert (done.stdout + done.stderr).count("calibrating featcal ") == 1
    one, two = (read_run(tmp_path / f"log{devices}") for devices in (1, 2))
    assert two.row("featcal").cost["processes"] == 2
    assert two.row("featcal").cost["exchanged_bytes"] > 1e6
    for task, accuracy in one.accuracy["featcal"].items():  # of whole test sets
        assert two.accuracy["featcal"][task] == pytest.approx(accuracy, abs=0.01)
    assert not list(log_dir.rglob("*.part")) and (log_dir / "program_report.json").is_file()
    for pair in zip(*(model.parameters() for model in saved), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


def test_other_strategies_are_refused() -> None:
    algorithm: Any = FeatCalAlgorithm()
    algorithm.fabric = SimpleNamespace(world_size=2, strategy=object(), _loggers=[])
    with pytest.raises(CalibrationError, match=r"needs fabric\.strategy=ddp"):
        algorithm.run(None)


@pytest.mark.parametrize("rule", [PAPER, PLUS])
def test_a_process_without_images_waits_for_that_with_images(rule: Any):
    """Texts alone begin with the decoder."""
    suite = suite_named("llava", "images")
    settings = {"samples_per_task": samples_in(suite), "rule": rule}
    expected = run_fast(suite, **settings)

    def work(processes: Any) -> Any:  # a model with hooks cannot be sent
        result = run_fast(suite, processes=processes, **settings)
        return records(result), distance(result.model, expected.model)

    (log, gap), (other_log, other_gap) = in_processes(2, work)
    assert log == other_log and max(gap, other_gap) < 1e-11
    task_records = {(r["block"].split(".")[1], r["task"]) for r in expected.log.select("task")}
    assert ("vision_tower", "task_1") not in task_records
    assert {("vision_tower", "task_0"), ("language_model", "task_1")} <= task_records
