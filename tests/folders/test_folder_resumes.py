"""`featcal calibrate` that ended early, or runs twice: what the next command does."""

import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from killing import MOMENTS, die_at
from made_folders import words, write_models, write_rows
from process_group import in_forks
from reports import error_of, featcal
from safetensors.torch import load_file
from tiny_image_texts import image_rows, llava_model, llava_processor
from tiny_texts import TASKS

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.data import scoring
from fusion_bench_featcal.folders import transformers_models
from fusion_bench_featcal.models import saving
from fusion_bench_featcal.run.checkpoint import CheckpointFolder

FAST = ("--preset", "paper", "--no-eval", "--set", "modules=[q_proj]")

LOG = "out/featcal/calibration_log.jsonl"


def killed(moment: str, count: int, command: list[str]) -> None:
    def work(_: int) -> None:
        die_at(moment, count)
        main(command)

    assert in_forks(1, work) == [-signal.SIGKILL]


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.slow
@pytest.mark.ci
def test_nothing_is_left_of_a_killed_run_after_the_next_one(folder: Path, monkeypatch):
    command, out, kept = words(folder, *FAST), folder / "out", names(folder)
    calls, replace = itertools.count(), os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: (next(calls), replace(*paths)))
        assert main(command) == 0
    last = next(calls) - 1  # the call that gives OUT its name
    expected = (out / "model.safetensors").read_bytes()
    shutil.rmtree(out)
    kills = [(MOMENTS[0], 1), (MOMENTS[1], last - 2), (MOMENTS[1], last), (MOMENTS[2], last)]
    for moment, count in kills:
        killed(moment, count, command)
        assert names(folder) > kept  # the lock, and what was written
        done = featcal(*command, "--resume")
        assert done.code == 0, (moment, count, done.err)
        assert names(folder) == kept | {"out"}, (moment, count)
        assert (out / "model.safetensors").read_bytes() == expected
        shutil.rmtree(out)


def test_a_second_command_with_the_same_folder_is_refused(folder: Path, monkeypatch):
    command, write, lines = words(folder, *FAST), CheckpointFolder.save_block, set[str]()

    def write_and_start(*arguments: Any) -> Any:
        lines.add(error_of(*command))
        return write(*arguments)

    monkeypatch.setattr(CheckpointFolder, "save_block", write_and_start)
    assert featcal(*command).code == 0
    assert lines == {
        f"--out {folder}/out is in use by another process. Wait until it ends, or name another "
        "folder"
    }


def change(file: Path) -> None:
    """Exchange two lines of a text, or two bytes of the last number of other files."""
    content = file.read_bytes()
    first, second, *more = content.split(b"\n")
    changed = b"\n".join([second, first, *more])
    if file.suffix != ".jsonl":
        changed = content[:-4] + content[-3:-2] + content[-4:-3] + content[-2:]
    assert changed != content and len(changed) == len(content)
    file.write_bytes(changed)


CHANGES = {"--data one": "one.jsonl", "--expert two": "two/model.safetensors"}


@pytest.mark.parametrize("option", CHANGES)
def test_a_finished_run_with_changed_inputs_is_not_taken_for_this_one(option, folder: Path):
    command, file = [*words(folder, *FAST), "--resume"], folder / CHANGES[option]
    assert main(command) == 0
    assert "this command saved it before" in featcal(*command).out
    change(file)
    assert re.search(rf"saved by this command .*: {option} changed since", error_of(*command))


DAMAGES: dict[str, tuple[str, Any]] = {
    "changed": ("model.safetensors", change),
    "cut": ("model.safetensors", lambda file: os.truncate(file, file.stat().st_size - 4)),
    "empty": ("config.json", lambda file: file.write_text("{}")),
    "removed": ("tokenizer.json", Path.unlink),
    "report": ("featcal/lines.csv", Path.unlink),
    "digests": ("featcal/files.json", Path.unlink),
}


def test_a_finished_run_with_damaged_files_is_not_taken_for_whole(folder: Path):
    """Files that a user added do not count, nor does the card, which users edit or remove."""
    command, out = [*words(folder, *FAST), "--resume"], folder / "out"
    assert main(command) == 0
    (out / "notes.txt").write_text("a user's")
    (out / "README.md").write_text("another card")
    assert "this command saved it before" in featcal(*command).out
    (out / "README.md").unlink()
    for kind, (name, damage) in DAMAGES.items():
        whole = (out / name).read_bytes()
        damage(out / name)
        message = error_of(*command)
        expected = f"{out} is not as this command saved it: {name} changed or is missing. Restore"
        assert message.startswith(expected) and f"or remove {out} to calibrate" in message, kind
        (out / name).write_bytes(whole)
    assert "this command saved it before" in featcal(*command).out
    (out / "featcal" / "files.json").write_text("{")
    assert "featcal/files.json is damaged" in error_of(*command)


def test_files_of_a_user_beside_finished_blocks_stay(folder: Path):
    command, blocks = [*words(folder, *FAST), "--resume"], folder / "out.blocks"
    mine = ("notes.txt", "notes.json", "deep/block-0000.safetensors")
    for name in mine:
        (blocks / name).parent.mkdir(parents=True, exist_ok=True)
        (blocks / name).write_text("mine")
    for words_on_screen in ("calibrating", "this command saved it before"):
        assert words_on_screen in featcal(*command).out
        left = {str(f.relative_to(blocks)) for f in blocks.rglob("*") if f.is_file()}
        assert left == {*mine}
    assert (folder / "out" / "model.safetensors").is_file()


def test_files_that_are_no_inputs_do_not_count(folder: Path):
    command = [*words(folder, *FAST, "--tokenizer", str(folder / "merged")), "--resume"]
    assert main(command) == 0
    others = ("merged/train_log.txt", "one/.DS_Store", "two/other.safetensors")
    for name in (*others, "merged/LICENSE", "merged/NOTICE", "one/LICENSE.txt"):
        (folder / name).write_text("no input")
    assert "this command saved it before" in featcal(*command).out
    for name in ("one/vocab.txt", "two/2_Dense/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    assert ": --expert one, --expert two changed since" in error_of(*command)


def test_a_plan_leaves_the_files_of_a_running_command(folder: Path):
    file = folder / "out.blocks" / "inputs.json"
    file.parent.mkdir()
    file.write_text("{}")
    assert featcal(*words(folder, *FAST), "--plan").code == 0 and file.exists()


@pytest.mark.parametrize("option", CHANGES)
def test_an_interrupted_run_does_not_go_on_with_changed_inputs(option, folder: Path):
    """It says so before it calibrates."""
    command, file = words(folder, *FAST), folder / CHANGES[option]
    before, kept = file.read_bytes(), names(folder) | {"out.blocks"}
    killed(MOMENTS[2], 2, command)  # after the second block
    change(file)
    done = featcal(*command, "--resume")
    assert re.search(rf"{option} changed since the blocks in .*out\.blocks were", done.err)
    assert done.code == 2 and "calibrating" not in done.out
    assert names(folder) == kept
    file.write_bytes(before)
    assert main([*command, "--resume"]) == 0
    log = [*map(json.loads, (folder / LOG).read_text().splitlines())]
    assert [record["blocks"] for record in log if record["kind"] == "resumed"] == [2]


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_an_interrupted_evaluation_does_not_lose_the_calibration(kind, copied, monkeypatch):
    folder, score, calls = copied(kind), scoring.Tests.score, itertools.count()
    command, weights = words(folder, "--preset", "paper"), folder / "out" / "model.safetensors"

    def interrupted(*arguments: Any) -> Any:
        if next(calls) == 3:  # both experts and the merged model on one task are done
            os.kill(os.getpid(), signal.SIGINT)
        return score(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(scoring.Tests, "score", interrupted)
        done = featcal(*command)
    assert "interrupted" in done.err and not (folder / "out").exists()
    assert done.out.index("calibrating; ") < done.out.index("evaluating the experts, the merged")
    again = featcal(*command, "--resume")
    assert again.code == 0, again.err
    log = [*map(json.loads, (folder / LOG).read_text().splitlines())]
    (resumed,) = (record for record in log if record["kind"] == "resumed")
    assert resumed["blocks"] == len({r["block"] for r in log if r["kind"] == "block"}) > 1
    expected = weights.read_bytes()
    shutil.rmtree(folder / "out")
    assert main(command) == 0 and weights.read_bytes() == expected


def test_a_block_that_is_damaged_before_it_is_saved_is_named(folder: Path, monkeypatch):
    block, write = folder / "out.blocks" / "block-0000.safetensors", saving.write_shards

    def damaging(*arguments: Any) -> None:
        change(block)
        write(*arguments)

    monkeypatch.setattr(transformers_models, "write_shards", damaging)
    message = error_of(*words(folder, *FAST))
    assert f"{block}: it has changed" in message and "--resume" in message
    assert not (folder / "out").exists() and block.exists()


def test_the_disk_has_to_hold_blocks_and_model(folder: Path, monkeypatch):
    size = sum(tensor.nbytes for tensor in load_file(folder / "one" / "model.safetensors").values())
    free = SimpleNamespace(free=size * 3 // 2)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    message = error_of(*words(folder, *FAST))
    assert message.startswith("nothing was calibrated: the run needs ")
    assert re.search(r" of disk space in \S*/out and \S*/out\.blocks, .* are free", message)
    free.free = size * 5 // 2
    assert main(words(folder, *FAST)) == 0


def test_another_picture_under_the_same_name_is_noticed(tmp_path: Path):
    write_models(tmp_path, llava_model(), llava_processor())
    for number, task in enumerate(TASKS):
        write_rows(tmp_path / f"{task}.jsonl", image_rows(tmp_path, number))
    command = [*words(tmp_path, "--preset", "paper", "--no-eval"), "--resume"]
    assert main(command) == 0
    assert "this command saved it before" in featcal(*command).out
    shutil.copy(tmp_path / "1-2.png", tmp_path / "1-1.png")  # in a part of a turn
    assert re.search(r"with other files: --data two changed since", error_of(*command))
