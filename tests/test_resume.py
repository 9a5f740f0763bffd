"""An interrupted calibration goes on where it was, to the bit-identical model, or says why not."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, replay, run_fast
from tiny_models import Suite, clip_suite, gpt2_suite, scatter
from tiny_open_clip import tower_suite
from tiny_t5 import t5_suite

from fusion_bench_featcal import CalibrationError, CalibrationResult
from fusion_bench_featcal.checkpoints.store import Checkpoints


class Interrupted(BaseException):
    """Stands for whatever ends a process."""


def run(suite: Suite, folder: Path, *, resume: bool = False, **more: Any) -> CalibrationResult:
    return run_fast(suite, checkpoint_dir=str(folder), resume=resume, **more)


def interrupt(suite: Suite, folder: Path, blocks: int, monkeypatch: Any, **more: Any) -> None:
    """Run until some blocks are kept."""
    keep, kept = Checkpoints.keep, []

    def count(self: Checkpoints, block: str, *rest: Any) -> None:
        if len(kept) == blocks:
            raise Interrupted
        kept.append(block)
        keep(self, block, *rest)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(Checkpoints, "keep", count)
        run(suite, folder, **more)


def records(result: CalibrationResult) -> list[dict[str, Any]]:
    """The log without what a resumed run adds, and without times."""
    kept = [record for record in result.log.records if record["kind"] != "resumed"]
    return [{key: value for key, value in r.items() if key != "seconds"} for r in kept]


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any], int]] = {
    "clip": (clip_suite, {}, 2),
    "clip without expert features": (clip_suite, {"mix_alpha": 0.0, "log_drift": False}, 2),
    "float32": (lambda: clip_suite().to(torch.float32), {"log_drift": False}, 2),
    "replay": (clip_suite, {"family": replay(clip_suite())}, 2),
    "gpt2": (gpt2_suite, {"modules": ["h.1.*"]}, 2),
    "open_clip": (tower_suite, {}, 2),
    "t5": (t5_suite, {}, 4),
    "t5 in float32": (lambda: t5_suite().to(torch.float32), {"log_drift": False}, 4),
}


SLOW = {"t5 in float32"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SUITES]
)
def test_resumed_model_and_log_are_those_of_an_uninterrupted_run(name: str, tmp_path, monkeypatch):
    make, more, blocks = SUITES[name]
    suite = make()
    wanted = run_fast(suite, **more)
    for kept in range(blocks + 1):
        folder = tmp_path / str(kept)
        if kept < blocks:
            interrupt(suite, folder, kept, monkeypatch, **more)
        else:
            run(suite, folder, **more)
        assert len(list(folder.glob("block-*.json"))) == kept
        found = run(suite, folder, resume=True, **more)
        assert_identical(found.model, wanted.model)
        assert records(found) == records(wanted)
        assert [r["blocks"] for r in found.log.of_kind("resumed")] == ([kept] if kept else [])


def test_run_without_a_folder_writes_nothing_and_is_the_same(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    suite = clip_suite()
    assert_identical(run(suite, tmp_path / "kept").model, run_fast(suite).model)
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]


def test_resuming_from_nothing_begins_anew(tmp_path: Path):
    suite = clip_suite()
    found = run(suite, tmp_path / "new" / "folder", resume=True)
    assert_identical(found.model, run_fast(suite).model)
    assert not found.log.of_kind("resumed")


def test_run_may_be_interrupted_again_and_again(tmp_path: Path, monkeypatch):
    suite = t5_suite()
    interrupt(suite, tmp_path, 1, monkeypatch)
    for _ in range(2):
        interrupt(suite, tmp_path, 1, monkeypatch, resume=True)
    assert len(list(tmp_path.glob("block-*.json"))) == 3
    assert_identical(run(suite, tmp_path, resume=True).model, run_fast(suite).model)


def test_block_after_a_missing_one_is_calibrated_anew(tmp_path: Path):
    suite = t5_suite()
    wanted = run(suite, tmp_path)
    (tmp_path / "block-0001.json").unlink()
    found = run(suite, tmp_path, resume=True)
    assert_identical(found.model, wanted.model)
    assert found.log.of_kind("resumed")[0]["blocks"] == 1


def test_experts_of_finished_blocks_are_read_as_often_as_ever(tmp_path: Path):
    suite = clip_suite()
    wanted = run_fast(suite).log.expert_bytes
    assert run(suite, tmp_path).log.expert_bytes == wanted


def test_checkpoints_without_resume_are_not_touched(tmp_path: Path):
    suite = clip_suite()
    run(suite, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CalibrationError, match=r"checkpoint_dir .*method\.resume=true.*another"):
        run(suite, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def changed_weights(model: Any, block: int, size: float = 1e-6) -> Any:
    model = copy.deepcopy(model)
    names = [n for n, _ in model.named_parameters() if f"layers.{block}." in n]
    with torch.no_grad():
        model.get_parameter(names[-1]).view(-1)[0] += size
    return model


def other_expert(suite: Suite) -> Suite:
    suite.experts["task_1"] = changed_weights(suite.experts["task_1"], 0)
    return suite


def other_base(suite: Suite) -> Suite:
    suite.base = changed_weights(suite.base, 0)
    return suite


def other_merged(suite: Suite) -> Suite:
    suite.merged = changed_weights(suite.merged, 1)
    return suite


def other_stem(suite: Suite) -> Suite:
    expert = scatter(suite.experts["task_0"], 0, 0.0)
    with torch.no_grad():
        next(iter(expert.parameters())).view(-1)[0] += 1e-6
    suite.experts["task_0"] = expert
    return suite


def other_samples(suite: Suite) -> Suite:
    suite.inputs["task_2"][1]["pixel_values"][0, 0, 0, 0] += 1e-9
    return suite


def other_batches(suite: Suite) -> Suite:
    suite.inputs["task_2"] = suite.inputs["task_2"][::-1]
    return suite


def fewer_tasks(suite: Suite) -> Suite:
    del suite.experts["task_0"], suite.inputs["task_0"]
    return suite


def other_order(suite: Suite) -> Suite:
    suite.experts = dict(reversed(suite.experts.items()))
    return suite


def other_activation(suite: Suite) -> Suite:
    for module in suite.merged.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = torch.nn.ReLU()
    return suite


CHANGES: dict[Callable[[Suite], Suite], str] = {
    other_expert: r"modelpool\.models\.task_1: 1 of \d+ tensors, the first is .*layers\.0",
    other_base: r"modelpool\.models\._pretrained_: 1 of",
    other_merged: r"weights of the merged model \(1 of \d+ tensors, the first is .*layers\.1",
    other_stem: r"modelpool\.models\.task_0: 1 of",
    other_samples: r"samples of the tasks \['task_2'\]",
    other_batches: r"samples of the tasks \['task_2'\]",
    fewer_tasks: r"modelpool\.models.*task_0.* then",
    other_order: r"modelpool\.models.*task_0.* then",
    other_activation: r"merged model's modules",
}


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changed_is_named(change: Callable, blocks: int, tmp_path: Path, monkeypatch):
    if blocks == 1:
        interrupt(clip_suite(), tmp_path, 1, monkeypatch)
    else:
        run(clip_suite(), tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CalibrationError, match=rf"method\.checkpoint_dir.*{CHANGES[change]}"):
        run(change(clip_suite()), tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("ridge_lambda", 0.06), ("mix_alpha", 0.2), ("batch_size", 3), ("calibrate_bias", False),
     ("log_drift", False), ("modules", ["fc1"])],
)  # fmt: skip
def test_changed_setting_is_named_with_both_values(name: str, value: Any, tmp_path: Path):
    suite = clip_suite(tasks=1)
    run(suite, tmp_path)
    with pytest.raises(CalibrationError, match=rf"method\.{name} \(.* then, .* now\)"):
        run(suite, tmp_path, resume=True, **{name: value})


def test_expert_that_only_unfinished_blocks_need_may_change(tmp_path: Path, monkeypatch):
    interrupt(clip_suite(), tmp_path, 1, monkeypatch)
    changed = clip_suite()
    changed.experts["task_1"] = changed_weights(changed.experts["task_1"], 1)
    found = run(changed, tmp_path, resume=True)
    assert_identical(found.model, run_fast(changed).model)


def test_machine_that_rounds_otherwise_is_warned_of(tmp_path: Path, monkeypatch, caplog):
    suite = clip_suite(tasks=1)
    run(suite, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    run(suite, tmp_path, resume=True)
    assert "threads" in caplog.text and "77" in caplog.text


def test_autocast_is_told_apart(tmp_path: Path):
    from calibrations import PAPER, cast, settings_of

    from fusion_bench_featcal import calibrate

    suite = clip_suite(tasks=1).to(torch.float32)
    run(suite, tmp_path)
    with pytest.raises(CalibrationError, match=r"precision: autocast \(null then, .*bfloat16"):
        calibrate(
            suite.merged, suite.base, suite.experts, cast(suite.inputs, torch.float32),
            settings_of(PAPER, suite, checkpoint_dir=str(tmp_path), resume=True),
            autocast=lambda: torch.autocast("cpu", torch.bfloat16), progress=False,
        )  # fmt: skip
