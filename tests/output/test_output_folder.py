"""A calibration that stops goes on from the shards of its model, or says why not."""

import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, settings_of, with_rule
from fuzzing import NAMES_A_SETTING, damage
from oracle import Knobs
from process_group import in_forks
from tiny_models import Suite, clip_suite, gpt2_suite, t5_suite
from tiny_open_clip import tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.calibration import calibrate
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.files import owner_mark
from fusion_bench_featcal.output import check_output
from fusion_bench_featcal.output.folder import OutputFolder
from fusion_bench_featcal.processes import Processes
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus

PAPER_RULE: Any = Paper()


class Interrupted(BaseException):
    """Stands for whatever ends a process."""


def run(suite: Suite, folder: Path | None = None, *, resume: bool = False, rule: Any = None,
        autocast: Any = None, **more: Any) -> Any:  # fmt: skip
    place, rule = None if folder is None else str(folder), rule if rule is not None else PAPER_RULE
    settings = settings_of(
        Knobs(), suite, family=suite.family, checkpoint_dir=place, resume=resume, **more
    )
    return calibrate(
        suite.merged, suite.base, suite.experts, suite.inputs, with_rule(settings, rule),
        autocast=autocast,
    )  # fmt: skip


def interrupt(suite: Suite, folder: Path, blocks: int, monkeypatch: Any, **more: Any) -> None:
    """Run until some blocks are written."""
    write, written = OutputFolder.write, []

    def count(self: OutputFolder, block: str, *rest: Any) -> Any:
        if block not in self._finished:
            if len(written) == blocks:
                raise Interrupted
            written.append(block)
        return write(self, block, *rest)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(OutputFolder, "write", count)
        run(suite, folder, **more)


def records(result: Any) -> list[dict[str, Any]]:
    """The log without what a resumed run adds, times, and the bytes that this run has read."""
    kept = [record for record in result.log.plain_records() if record["kind"] != "resumed"]
    return [
        {key: value for key, value in r.items() if key not in ("seconds", "expert_bytes")}
        for r in kept
    ]


def listed(folder: Path) -> list[str]:
    return list(json.loads((folder / "blocks.json").read_text())["blocks"])


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any], int]] = {
    "clip": (clip_suite, {}, 2),
    "weights alone": (clip_suite, {"rule": Paper(mix_alpha=0.0), "log_drift": False}, 2),
    "held out": (clip_suite, {"held_out": 1}, 2),
    "gpt2": (gpt2_suite, {"modules": ["h.1.*"]}, 2),
    "open_clip": (tower_suite, {}, 2),
    "t5": (t5_suite, {}, 4),
    "plus": (clip_suite, {"rule": Plus()}, 2),
    "plus, t5": (t5_suite, {"rule": Plus(), "held_out": 1}, 4),
    "budget": (clip_suite, {"expert_read_budget": "60%"}, 2),
}


@pytest.mark.parametrize("name", SUITES)
def test_resumed_model_and_log_are_those_of_an_uninterrupted_run(name: str, tmp_path, monkeypatch):
    make, more, blocks = SUITES[name]
    suite = make()
    wanted = run(suite, **more)
    for kept in range(blocks + 1):
        folder = tmp_path / str(kept)
        if kept < blocks:
            interrupt(suite, folder, kept, monkeypatch, **more)
        else:
            run(suite, folder, **more)
        assert len(listed(folder)) == kept
        found = run(suite, folder, resume=True, **more)
        assert_identical(found.model, wanted.model)
        assert records(found) == records(wanted)
        assert [r["blocks"] for r in found.log.of_kind("resumed")] == ([kept] if kept else [])
        assert found.reads["plan"] == wanted.reads["plan"]


@pytest.mark.parametrize("name", ["clip", "gpt2", "t5", "open_clip"])
def test_finished_folder_is_the_model(name: str, tmp_path: Path):
    suite = SUITES[name][0]()
    model = run(suite, tmp_path).model
    source = SafetensorsExpert(tmp_path)
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): key for key, tensor in reversed(state.items())}
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(weight_map) == set(first.values())
    assert all(torch.equal(source.tensor(key), state[key]) for key in weight_map)
    if name == "open_clip":
        return
    model.config.dtype = model.dtype
    model.config.save_pretrained(tmp_path)
    assert_identical(type(model).from_pretrained(tmp_path, dtype=model.dtype), model)


def test_finished_run_is_repeated_without_running_anything(tmp_path: Path, monkeypatch: Any):
    suite = clip_suite()
    wanted = run(suite, tmp_path)
    monkeypatch.setattr(torch.nn.MultiheadAttention, "forward", None)
    monkeypatch.setattr("fusion_bench_featcal.calibration.calibrate_blocks", None)
    assert_identical(run(suite, tmp_path, resume=True).model, wanted.model)


def test_run_may_be_interrupted_again_and_again(tmp_path: Path, monkeypatch):
    suite = t5_suite()
    interrupt(suite, tmp_path, 1, monkeypatch)
    for _ in range(2):
        interrupt(suite, tmp_path, 1, monkeypatch, resume=True)
    assert len(listed(tmp_path)) == 3
    assert_identical(run(suite, tmp_path, resume=True).model, run(suite).model)


def test_blocks_from_a_missing_file_on_are_calibrated_anew(tmp_path: Path):
    suite = t5_suite()
    wanted = run(suite, tmp_path)
    (tmp_path / "block-0001.safetensors").unlink()
    found = run(suite, tmp_path, resume=True)
    assert_identical(found.model, wanted.model)
    assert found.log.of_kind("resumed")[0]["blocks"] == 1


def test_finished_blocks_without_resume_are_not_touched(tmp_path: Path):
    suite = clip_suite()
    run(suite, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CalibrationError, match=r"checkpoint_dir .*method\.resume=true.*another"):
        run(suite, tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def nudge(model: Any, inside: str) -> None:
    """Change the first number of the last parameter whose name has some text."""
    name = [name for name, _ in model.named_parameters() if inside in name][-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-6


def other_activation(suite: Suite) -> None:
    for module in suite.merged.modules():
        if hasattr(module, "activation_fn"):
            module.activation_fn = torch.nn.ReLU()


CHANGES: list[tuple[Callable[[Suite], Any], str]] = [
    (lambda s: nudge(s.experts["task_1"], "layers.1."),
     r"weights of expert task_1 \(modelpool\.models\.task_1\)\."),
    (lambda s: nudge(s.base, "layers.0."), r"base _pretrained_ \(modelpool\.models\._pretrained_"),
    (lambda s: nudge(s.merged, "layers.1."), r"weights of the merged model\. "),
    (lambda s: s.inputs["task_2"][1]["pixel_values"][0].add_(1e-9), r"samples of task task_2\."),
    (lambda s: s.inputs["task_2"].reverse(), r"samples of task task_2\."),
    (lambda s: (s.experts.pop("task_0"), s.inputs.pop("task_0")), r"tasks .*task_0.* then"),
    (lambda s: s.experts.update(task_0=s.experts.pop("task_0")), r"tasks .*\[\"task_0"),
    (other_activation, r"merged model's modules"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_what_changed_is_named(change: Callable, message: str, tmp_path: Path, monkeypatch):
    suite = clip_suite()
    interrupt(suite, tmp_path, 1, monkeypatch)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    change(suite)
    with pytest.raises(CalibrationError, match=rf"method\.checkpoint_dir.*{message}"):
        run(suite, tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("name", "value"),
    [("seed", 1), ("batch_size", 3), ("log_drift", False), ("modules", ["fc1"]),
     ("expert_read_budget", "50%")],
)  # fmt: skip
def test_changed_setting_is_named_with_both_values(name: str, value: Any, tmp_path: Path):
    suite = clip_suite(tasks=1)
    run(suite, tmp_path)
    message = rf"method\.{name} \(.* then, .* now\)"
    with pytest.raises(CalibrationError, match=message):
        run(suite, tmp_path, resume=True, **{name: value})
    settings = settings_of(
        Knobs(), suite, checkpoint_dir=str(tmp_path), resume=True, **{name: value}
    )
    with pytest.raises(CalibrationError, match=message):  # before a model is loaded
        check_output(settings, Processes())


def test_rule_and_autocast_are_told_apart(tmp_path: Path):
    suite = clip_suite(tasks=1).to(torch.float32)
    run(suite, tmp_path)
    with pytest.raises(CalibrationError, match=r"rule \(.*Paper.* then, .*Plus.* now"):
        run(suite, tmp_path, resume=True, rule=Plus())
    with pytest.raises(CalibrationError, match=r"precision: autocast \(null then, .*bfloat16"):
        run(suite, tmp_path, resume=True, autocast=lambda: torch.autocast("cpu", torch.bfloat16))


def test_machine_that_rounds_otherwise_is_warned_of(tmp_path: Path, monkeypatch, caplog):
    suite = clip_suite(tasks=1)
    run(suite, tmp_path)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    run(suite, tmp_path, resume=True)
    assert "threads" in caplog.text and "77" in caplog.text


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_at_once_in_one_folder_are_refused(resume: bool, tmp_path: Path, monkeypatch):
    suite = clip_suite(tasks=1)
    if resume:
        interrupt(suite, tmp_path, 0, monkeypatch)
    read = OutputFolder.read

    def meanwhile(self: OutputFolder, *rest: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(OutputFolder, "read", read)
            run(suite, tmp_path, resume=True)
        return read(self, *rest)

    monkeypatch.setattr(OutputFolder, "read", meanwhile)
    with pytest.raises(CalibrationError, match=r"another run has begun to use method\.checkpoint"):
        run(suite, tmp_path, resume=resume)


def test_folder_that_cannot_be_made_is_named_before_any_work(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    for folder in (tmp_path / "taken", tmp_path / "taken" / "inner"):
        with pytest.raises(
            CalibrationError, match=r"taken.*: (File exists|Not a dir).*method\.checkpoint_dir"
        ):
            run(clip_suite(tasks=1), folder)


def test_what_killed_processes_left_behind_goes_and_other_files_stay(tmp_path: Path):
    (dead,) = in_forks(1, lambda _: os.getpid())
    host = owner_mark().removesuffix(f"-{os.getpid()}")
    gone = [f".block-0000.safetensors.{host}-{dead}-0.part", f".blocks.json.{host}-{dead}-1.part"]
    alive = f".blocks.json.{host}-{os.getppid()}-0.part"
    kept = {f".blocks.json.elsewhere-{dead}-0.part", alive, ".mine.part", "notes.txt"}
    for name in (*gone, *kept):
        (tmp_path / name).write_text("half")
    run(clip_suite(tasks=1), tmp_path)
    there = {entry.name for entry in tmp_path.iterdir()}
    assert kept <= there and not there & set(gone)


def test_full_disk_says_how_much_is_needed_and_leaves_usable_blocks(tmp_path: Path, monkeypatch):
    suite, replace = clip_suite(tasks=1), os.replace
    wanted = run(suite).model

    def full(source: Any, target: Any) -> None:
        if Path(target).name == "block-0001.safetensors":
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr("os.replace", full)
    message = r"0001\.safetensors: No space.*needs .*iB, and .*iB are free.*checkpoint_dir"
    with pytest.raises(CalibrationError, match=message):
        run(suite, tmp_path)
    monkeypatch.undo()
    assert not list(tmp_path.glob(".*"))
    resumed = run(suite, tmp_path, resume=True)
    assert [record["blocks"] for record in resumed.log.of_kind("resumed")] == [1]
    assert_identical(resumed.model, wanted)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("seed", range(6))
def test_killed_run_resumes_to_the_same_model(seed: int, tmp_path: Path):
    suite, generator = (clip_suite, t5_suite)[seed % 2](tasks=1), random.Random(seed)
    wanted = run(suite).model

    def killed(turn: int, after: bool) -> None:
        replace, left = os.replace, [turn]

        def replaced(source: Any, target: Any) -> None:
            left[0] -= 1
            if left[0] < 0 and not after:
                _die()
            replace(source, target)
            if left[0] < 0:
                _die()

        os.replace = replaced
        run(suite, tmp_path, resume=True)

    for _ in range(2):
        turn, after = generator.randrange(1, 5), generator.random() < 0.5
        in_forks(1, lambda _, turn=turn, after=after: killed(turn, after))
    assert_identical(run(suite, tmp_path, resume=True).model, wanted)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Suite, Path, Path, nn.Module]:
    """A finished run, and another one."""
    folder, suite = tmp_path_factory.mktemp("finished"), clip_suite(tasks=1)
    run(clip_suite(tasks=1, seed=1), folder / "other")
    return suite, folder / "clip", folder / "other", run(suite, folder / "clip").model


@pytest.mark.parametrize("seed", range(16))
def test_damage_is_refused_or_harmless(finished, seed: int, tmp_path: Path):
    suite, folder, other, wanted = finished
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    what = damage(damaged, other, seed)
    try:
        found = run(suite, damaged, resume=True)
    except CalibrationError as error:
        assert NAMES_A_SETTING.search(str(error)) and str(damaged) in str(error), (what, error)
    else:
        assert_identical(found.model, wanted)
        assert_identical(run(suite, damaged, resume=True).model, wanted)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("blocks.json", b"", r"blocks\.json.*not valid JSON.*Remove that folder"),
        ("blocks.json", b"[]", r"blocks\.json.*digest"),
        ("blocks.json", b'{"checksum": "earlier"}', r"blocks\.json.*digest.*Remove"),
        ("blocks.json", b"\xff\xfe", r"blocks\.json.*not valid JSON"),
        ("blocks.json", b"[" * 100_000, r"blocks\.json .*not valid JSON"),
        ("block-0000.safetensors", b"", r"block-0000\.safetensors.*digest.*Remove .*0000\.safet"),
    ],
)
def test_message_names_the_file_and_the_remedy(finished, name, content, message, tmp_path: Path):
    suite, folder, _, wanted = finished
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    (damaged / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        run(suite, damaged, resume=True)
    if name.startswith("block-"):
        (damaged / name).unlink()
        assert_identical(run(suite, damaged, resume=True).model, wanted)
