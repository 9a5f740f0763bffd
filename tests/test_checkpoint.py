"""A calibration that stops resumes from the shards of its model, or says why not."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from killing import MOMENTS, die_at
from process_group import in_forks
from tiny_models import Suite, clip_suite, t5_suite
from tiny_open_clip import tower_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, Plus


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2, 2)).to(torch.float32)


def run(suite: Suite, folder: Path, **more: Any) -> Any:
    return run_fast(suite, checkpoint_dir=str(folder), **more)


def records(result: Any) -> list[dict[str, Any]]:
    """The log without records of resuming and times."""
    plain = (r for r in result.log.plain_records() if r["kind"] != "resumed")
    return [{key: value for key, value in r.items() if key != "seconds"} for r in plain]


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (lambda: small_clip().to(torch.bfloat16), {"expert_read_budget": "60%"}),
    "open_clip": (tower_suite, {}),
    "t5": (lambda: t5_suite(depths=(1, 1)), {"rule": Plus()}),
}


@pytest.mark.parametrize("name", SUITES)
def test_a_resumed_run_has_the_bits_and_log_of_an_uninterrupted_one(name: str, tmp_path: Path):
    make, more = SUITES[name]
    suite = make()
    expected = run(suite, tmp_path, **more)
    for blocks in (2, 1):  # of two
        result = run(suite, tmp_path, resume=True, **more)
        assert_identical(result.model, expected.model)
        assert records(result) == records(expected)
        assert [record["blocks"] for record in result.log.of_kind("resumed")] == [blocks]
        assert result.reads["plan"] == expected.reads["plan"]
        (tmp_path / "block-0001.safetensors").unlink()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, as in forks: results are bit-identical with equal numbers of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    """The folder of a finished run of `small_clip`, and the model."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run(small_clip(), folder).model


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_process_leaves_a_folder_that_resumes_to_the_same_bits(
    finished: Any, moment: str, tmp_path: Path
):
    suite, expected = small_clip(), finished[1]
    for count in (1, 3):
        folder = tmp_path / str(count)

        def work(_: int, count: int = count, folder: Path = folder) -> None:
            die_at(moment, count)
            run(suite, folder)

        assert in_forks(1, work) == [-signal.SIGKILL]
        assert_identical(run(suite, folder, resume=True).model, expected)


def nudge(model: Any, inside: str) -> None:
    """Change the first number of the last parameter whose name contains a text."""
    name = [name for name, _ in model.named_parameters() if inside in name][-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1e-6


# A change of the suite, and settings.
CHANGES: dict[str, tuple[Callable[[Suite], Any], dict[str, Any]]] = {
    "expert": (lambda s: nudge(s.experts["task_1"], "layers.1."), {}),
    "base": (lambda s: nudge(s.base, "layers.0."), {}),
    "merged model": (lambda s: nudge(s.merged, "layers.1."), {}),
    "samples": (lambda s: s.inputs["task_1"][1]["pixel_values"][0].add_(1e-6), {}),
    "tasks": (lambda s: (s.experts.pop("task_0"), s.inputs.pop("task_0")), {}),
    "rule": (lambda _: None, {"rule": Plus()}),
    "precision": (lambda _: None, {"autocast": lambda: torch.autocast("cpu", torch.bfloat16)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_finished_blocks_of_another_run_are_refused_and_stay(finished: Any, name: str):
    suite, (change, more), folder = small_clip(), CHANGES[name], finished[0]
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(CalibrationError, match=r"checkpoint_dir .*method\.resume=true.*another"):
        run(suite, folder)
    change(suite)
    with pytest.raises(CalibrationError, match=r"belongs to another run: .*remove this one"):
        run(suite, folder, resume=True, **more)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "of another block"])
def test_damaged_files_are_refused_and_named(finished: Any, damage: str, tmp_path: Path):
    folder = shutil.copytree(finished[0], tmp_path / "damaged")
    contents = [(folder / f"block-000{n}.safetensors").read_bytes() for n in (0, 1)]
    content = contents[0] if damage == "of another block" else contents[1][:-9]
    (folder / "block-0001.safetensors").write_bytes(content)
    with pytest.raises(CalibrationError, match=r"method\.checkpoint_dir") as caught:
        run(small_clip(), folder, resume=True)
    assert str(folder) in str(caught.value)
