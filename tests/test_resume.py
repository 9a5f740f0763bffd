"""An interrupted calibration goes on where it was, to the bit-identical model, or says why not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, replay, run_fast
from tiny_models import Suite, clip_suite, gpt2_suite, t5_suite
from tiny_open_clip import tower_suite

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
    "plus": (clip_suite, PLUS, 2),
    "plus, t5": (t5_suite, PLUS, 4),
}
SLOW = ("t5", "plus, t5", "gpt2", "float32", "open_clip")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SUITES],
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


def test_checkpoints_without_resume_are_not_touched(tmp_path: Path):
    suite = clip_suite()
    run(suite, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CalibrationError, match=r"checkpoint_dir .*method\.resume=true.*another"):
        run(suite, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def nudge(model: Any, inside: str, size: float = 1e-6) -> None:
    """Change one number of the last parameter whose name has some text."""
    name = [name for name, _ in model.named_parameters() if inside in name][-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += size


def other_activation(suite: Suite) -> None:
    for module in suite.merged.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = torch.nn.ReLU()


FEWER = r"modelpool\.models.*task_0.* then"
CHANGES: list[tuple[int, Callable[[Suite], Any], str]] = [
    (1, lambda s: nudge(s.experts["task_1"], "layers.0."),
     r"modelpool\.models\.task_1: 1 of \d+ tensors, the first is .*layers\.0"),
    (2, lambda s: nudge(s.experts["task_1"], "layers.1."), r"modelpool\.models\.task_1: 1 of \d+"),
    (2, lambda s: nudge(s.base, "layers.0."), r"modelpool\.models\._pretrained_: 1 of"),
    (1, lambda s: nudge(s.merged, "layers.1."),
     r"weights of the merged model \(1 of \d+ tensors, the first is .*layers\.1"),
    (1, lambda s: nudge(s.experts["task_0"], "embedding"), r"modelpool\.models\.task_0: 1 of"),
    (2, lambda s: s.inputs["task_2"][1]["pixel_values"][0].add_(1e-9),
     r"samples of the tasks \['task_2'\]"),
    (1, lambda s: s.inputs["task_2"].reverse(), r"samples of the tasks \['task_2'\]"),
    (1, lambda s: (s.experts.pop("task_0"), s.inputs.pop("task_0")), FEWER),
    (2, lambda s: s.experts.update(task_0=s.experts.pop("task_0")), FEWER),  # another order
    (2, other_activation, r"merged model's modules"),
]  # fmt: skip


@pytest.mark.parametrize(("blocks", "change", "message"), CHANGES)
def test_what_changed_is_named(
    blocks: int, change: Callable, message: str, tmp_path: Path, monkeypatch
):
    suite = clip_suite()
    if blocks == 1:
        interrupt(suite, tmp_path, 1, monkeypatch)
    else:
        run(suite, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    change(suite)
    with pytest.raises(CalibrationError, match=rf"method\.checkpoint_dir.*{message}"):
        run(suite, tmp_path, resume=True)
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
    nudge(changed.experts["task_1"], "layers.1.")
    found = run(changed, tmp_path, resume=True)
    assert_identical(found.model, run_fast(changed).model)


def test_machine_that_rounds_otherwise_is_warned_of(tmp_path: Path, monkeypatch, caplog):
    suite = clip_suite(tasks=1)
    run(suite, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    run(suite, tmp_path, resume=True)
    assert "threads" in caplog.text and "77" in caplog.text


def test_autocast_is_told_apart(tmp_path: Path):
    suite = clip_suite(tasks=1).to(torch.float32)
    run(suite, tmp_path)
    with pytest.raises(CalibrationError, match=r"precision: autocast \(null then, .*bfloat16"):
        autocast = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}
        run(suite, tmp_path, resume=True, **autocast)


def test_keeping_blocks_changes_neither_model_nor_reads(tmp_path: Path, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    suite = clip_suite()
    wanted, found = run_fast(suite), run(suite, tmp_path / "kept")
    assert_identical(found.model, wanted.model)
    assert found.log.expert_bytes == wanted.log.expert_bytes
    assert [entry.name for entry in tmp_path.iterdir()] == ["kept"]
