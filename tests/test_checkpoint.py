"""A calibration that stops resumes from the shards of its model, or says why not."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from killing import MOMENTS, die_at, finished_blocks
from process_group import in_forks
from tiny_models import Suite, clip_suite, t5_suite
from tiny_open_clip import tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, Paper, Plus, SafetensorsExpert


class Interrupted(BaseException):
    """Stands for an error that ends a process."""


def small_clip(seed: int = 0) -> Suite:
    return clip_suite(tasks=2, sizes=(2, 2), seed=seed).to(torch.float32)


def small_t5() -> Suite:
    return t5_suite(depths=(1, 1))


def run(suite: Suite, folder: Path, **more: Any) -> Any:
    return run_fast(suite, checkpoint_dir=str(folder), **more)


def interrupt(suite: Suite, folder: Path, blocks: int, **more: Any) -> None:
    """Run until some blocks are written, and raise when the next one is."""
    replace, remaining = os.replace, [blocks]

    def counted(source: Any, target: Any) -> None:
        remaining[0] -= Path(target).name.startswith("block-")
        if remaining[0] < 0:
            raise Interrupted
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr("os.replace", counted)
        run(suite, folder, **more)


def records(result: Any) -> list[dict[str, Any]]:
    """The log without records of resuming and times."""
    plain = (r for r in result.log.plain_records() if r["kind"] != "resumed")
    return [{key: value for key, value in r.items() if key != "seconds"} for r in plain]


def restored(result: Any) -> list[int]:
    return [record["blocks"] for record in result.log.of_kind("resumed")]


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (small_clip, {"expert_read_budget": "60%"}),
    "bfloat16": (lambda: small_clip().to(torch.bfloat16), {"rule": Paper(mix_alpha=0.0)}),
    "open_clip": (tower_suite, {}),
    "t5": (small_t5, {"rule": Plus()}),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_resumed_run_has_the_bits_and_log_of_an_uninterrupted_one(name, tmp_path, monkeypatch):
    make, more = SUITES[name]
    suite = make()
    expected = run(suite, tmp_path / "whole", **more)
    interrupt(suite, tmp_path / "interrupted", 1, **more)
    for folder, blocks in (("interrupted", 1), ("whole", 2)):
        if folder == "whole":  # no block is calibrated
            monkeypatch.setattr("fusion_bench_featcal.calibration.calibrate_blocks", None)
        result = run(suite, tmp_path / folder, resume=True, **more)
        assert_identical(result.model, expected.model)
        assert records(result) == records(expected)
        assert restored(result) == [blocks]
        assert result.reads["plan"] == expected.reads["plan"]


def test_a_run_may_be_interrupted_again_and_again_and_lose_a_block(tmp_path: Path):
    suite = t5_suite(depths=(1, 2), tasks=1)
    interrupt(suite, tmp_path, 0)
    for _ in range(2):
        interrupt(suite, tmp_path, 1, resume=True)
    assert finished_blocks(tmp_path) == 2
    expected = run_fast(suite).model
    assert_identical(run(suite, tmp_path, resume=True).model, expected)
    (tmp_path / "block-0001.safetensors").unlink()
    result = run(suite, tmp_path, resume=True)
    assert_identical(result.model, expected)
    assert restored(result) == [1]


def test_a_finished_folder_is_the_model(tmp_path: Path):
    model: Any = run(small_t5(), tmp_path).model  # with tied tensors
    source = SafetensorsExpert(tmp_path)
    state = model.state_dict(keep_vars=True)
    first = {id(tensor): key for key, tensor in reversed(state.items())}
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(first.values())
    assert all(torch.equal(source.tensor(key), state[key]) for key in index["weight_map"])
    model.config.dtype = model.dtype
    model.config.save_pretrained(tmp_path)
    assert_identical(type(model).from_pretrained(tmp_path, dtype=model.dtype), model)


# --- refusals ---


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, nn.Module]:
    """The folder of a finished run of `small_clip`, the folder of another one, and the model."""
    folder = tmp_path_factory.mktemp("finished")
    run(small_clip(seed=1), folder / "other")
    return folder / "clip", folder / "other", run(small_clip(), folder / "clip").model


def nudge(model: Any, inside: str) -> None:
    """Change the first number of the last parameter whose name contains a text."""
    name = [name for name, _ in model.named_parameters() if inside in name][-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-6


ANOTHER = r"method\.checkpoint_dir .*belongs to another run: .*remove this one"
# A change of the suite, settings, and the message.
CHANGES: dict[str, tuple[Callable[[Suite], Any], dict[str, Any], str]] = {
    "expert": (lambda s: nudge(s.experts["task_1"], "layers.1."), {}, ANOTHER),
    "base": (lambda s: nudge(s.base, "layers.0."), {}, ANOTHER),
    "merged model": (lambda s: nudge(s.merged, "layers.1."), {}, ANOTHER),
    "samples": (lambda s: s.inputs["task_1"][1]["pixel_values"][0].add_(1e-6), {}, ANOTHER),
    "tasks": (lambda s: (s.experts.pop("task_0"), s.inputs.pop("task_0")), {}, ANOTHER),
    "seed": (lambda _: None, {"seed": 1}, ANOTHER),
    "rule": (lambda _: None, {"rule": Plus()}, ANOTHER),
    "precision": (lambda _: None, {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)},
                  ANOTHER),
    "no resume": (lambda _: None, {"resume": False},
                  r"checkpoint_dir .*method\.resume=true.*another"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_finished_blocks_of_another_run_are_refused_and_stay(finished: Any, name: str):
    suite, (change, more, message), folder = small_clip(), CHANGES[name], finished[0]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    change(suite)
    with pytest.raises(CalibrationError, match=message):
        run(suite, folder, **{"resume": True, **more})
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"file.*: Not a dir.*method\.checkpoint_dir"):
        run(small_clip(), tmp_path / "file" / "inner")


# The content that replaces that of the second block.
DAMAGE: dict[str, Callable[[bytes, Path, Path], bytes]] = {
    "cut": lambda content, *_: content[: len(content) // 2],
    "empty": lambda *_: b"",
    "longer": lambda content, *_: content + b"\0" * 8,
    "of another run": lambda _, folder, other: (other / "block-0001.safetensors").read_bytes(),
    "of another block": lambda _, folder, other: (folder / "block-0000.safetensors").read_bytes(),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_refused_and_named(finished: Any, name: str, tmp_path: Path):
    folder, other, _ = finished
    file = shutil.copytree(folder, tmp_path / "damaged") / "block-0001.safetensors"
    file.write_bytes(DAMAGE[name](file.read_bytes(), folder, other))
    with pytest.raises(CalibrationError, match=r"method\.checkpoint_dir") as caught:
        run(small_clip(), file.parent, resume=True)
    assert str(file.parent) in str(caught.value)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_process_leaves_a_folder_that_resumes_to_the_same_bits(
    finished: Any, moment: str, tmp_path: Path
):
    suite, expected = small_clip(), finished[2]
    for count in (1, 3):
        folder = tmp_path / str(count)

        def work(_: int, count: int = count, folder: Path = folder) -> None:
            die_at(moment, count)
            run(suite, folder)

        assert in_forks(1, work) == [-signal.SIGKILL]
        assert_identical(run(suite, folder, resume=True).model, expected)
