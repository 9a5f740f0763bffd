"""The `fusion_bench` command with several processes."""

import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from calibrations import assert_same
from cli_runs import fusion_bench
from process_group import in_forks, in_processes
from safetensors.torch import load_file, save_file
from tiny_models import clip_suite
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench.console import is_helper
from fusion_bench_featcal.fusionbench.program import prepare_run
from fusion_bench_featcal.fusionbench.program_processes import fabric_alone, share_model
from fusion_bench_featcal.processes import OtherProcessError, Processes
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites import image

TASKS = ("mini_balinese", "mini_korean")
WORDS = ("modelpool=clip-vit-mini_alphabets2", "fabric.accelerator=cpu", "print_config=false")
UNMERGED = (
    "method.base_method=null",
    f"+modelpool.models._merged_={image.path('pretrained')}",
    "method.compare_with=[]",
    "method.presets={}",
    "method.samples_per_task=8",
)


@pytest.mark.slow
def test_command_leaves_one_model_and_one_report(tmp_path: Path) -> None:
    words = [*WORDS, *UNMERGED, "method=featcal", "fabric.devices=2"]
    words += [f"path.log_dir={tmp_path}/log", 'merged_model_save_path="{log_dir}/calibrated"']
    done = fusion_bench(words, tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]
    shown = done.stdout + done.stderr
    for line in ("calibrating featcal ", "plan in the busiest of 2", "calibration time: featcal "):
        assert shown.count(line) == 1
    log_dir = tmp_path / "log"
    report = Report.load(log_dir)
    assert report.cost["featcal"]["processes"] == 2
    assert report.cost["featcal"]["exchanged_bytes"] > 1e6
    assert report.rows["featcal"]["average"] > 0.2  # of the whole test sets, not a half of each
    assert not list(log_dir.rglob("*.part")) and (log_dir / "program_report.json").is_file()

    base = CLIPVisionModel.from_pretrained(image.path("pretrained"))
    pixels = {task: batches_of(task) for task in TASKS}
    experts = {task: SafetensorsExpert(image.path(task)) for task in TASKS}
    settings = FeatCalSettings(samples_per_task=8)
    wanted = calibrate(base, base, experts, pixels, settings, progress=False)
    assert_same(CLIPVisionModel.from_pretrained(log_dir / "calibrated"), wanted.model, 1e-4)
    assert len((log_dir / "calibration_log.jsonl").read_text().splitlines()) == len(
        wanted.log.records
    )


def batches_of(task: str) -> Any:
    """The samples that the command draws."""
    from fusion_bench_featcal.calibration_data import calibration_batches

    pool = SimpleNamespace(
        train_dataset_names=[task], load_train_dataset=lambda t: image.load_split(t, "train")
    )
    settings = FeatCalSettings(samples_per_task=8)
    return calibration_batches(pool, [task], settings, image.load_processor())[task]


def command(words: Sequence[str], folder: Path) -> list[Any]:
    """Run the command in two processes, as if a launcher had started them: what each ended with."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> None:
        from fusion_bench.scripts.cli import _hydra_main

        os.chdir(folder)
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "test"}
        os.environ |= {"GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "HYDRA_FULL_ERROR": "1"}
        sys.argv = ["fusion_bench", *WORDS, "fabric.devices=2", *words]
        _hydra_main()

    return in_forks(2, work)


def test_failure_of_one_process_ends_the_command_in_all(tmp_path: Path) -> None:
    expert = tmp_path / "expert"
    shutil.copytree(image.path("mini_korean"), expert)
    tensors = load_file(expert / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.2.mlp.fc1.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, expert / "model.safetensors", {"format": "pt"})
    words = [*UNMERGED, "method=featcal", f"modelpool.models.mini_korean={expert}"]
    first, second = command([*words, "modelpool.default_taskpool=null"], tmp_path)
    for error in (first, second):
        with pytest.raises(CalibrationError, match=r"expert 'mini_korean': tensor .* has NaN"):
            raise error
    assert isinstance(first, OtherProcessError) and "(process 1 of 2" in str(first)


def test_failure_of_the_first_process_alone_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [*UNMERGED, "method=featcal", f"merged_model_save_path={tmp_path}/file/model"]
    for error in command(words, tmp_path):
        with pytest.raises(Exception, match="merged_model_save_path"):
            raise error


def test_other_methods_refuse_several_processes() -> None:
    program: Any = SimpleNamespace(fabric=SimpleNamespace(world_size=2))
    with pytest.raises(CalibrationError, match=r"in one process, not in 2: set fabric\.devices=1"):
        prepare_run(program, None)


def test_strategy_that_spreads_a_model_is_refused() -> None:
    algorithm = FeatCalAlgorithm()
    algorithm.fabric = SimpleNamespace(world_size=2, strategy=object(), _loggers=[])  # type: ignore[assignment]
    with pytest.raises(CalibrationError, match=r"needs fabric\.strategy=ddp"):
        algorithm.run(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("environment", "helps"),
    [
        ({}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, True),
        ({"RANK": "2", "LOCAL_RANK": "0"}, True),
        ({"NODE_RANK": "1"}, True),
        ({"SLURM_PROCID": "3"}, True),
    ],
)
def test_processes_that_help_are_known_before_they_meet(
    environment: dict[str, str], helps: bool
) -> None:
    assert is_helper(environment) is helps


def test_shared_model_is_the_same_in_all_processes() -> None:
    merged: Any = clip_suite().merged
    merged.tied = torch.nn.ParameterList([next(merged.parameters())])

    def work(processes: Processes) -> dict[str, Any]:
        mine = merged if processes.rank == 0 else None
        shared: Any = share_model(mine, processes, torch.device("cpu"), "method.base_method")
        assert shared.tied[0] is next(shared.parameters())
        everything = dict(shared.named_buffers()) | shared.state_dict()
        return {name: tensor.numpy() for name, tensor in everything.items()}

    first, second = in_processes(2, work)
    assert list(first) == list(second)
    assert all((first[name] == second[name]).all() for name in first)


def test_model_that_cannot_be_sent_names_the_merger() -> None:
    merged: Any = clip_suite().merged
    merged.helper = lambda: None

    def work(processes: Processes) -> None:
        mine = merged if processes.rank == 0 else None
        try:
            share_model(mine, processes, torch.device("cpu"), "method.base_method")
        except CalibrationError as error:
            processes.announce(error)
            raise

    for error in in_processes(2, work):
        with pytest.raises(CalibrationError, match=r"method.base_method returned .*devices=1"):
            raise error


@pytest.mark.slow
def test_model_that_cannot_be_saved_ends_all(tmp_path: Path, monkeypatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CLIPVisionModel, "save_pretrained", fail)
    words = [*UNMERGED, "method=featcal", f"merged_model_save_path={tmp_path}/saved/model"]
    first, second = command([*words, "modelpool.default_taskpool=null"], tmp_path)
    for error in (first, second):
        with pytest.raises(CalibrationError, match=r"saved/model: No space left"):
            raise error
    assert isinstance(second, OtherProcessError)
    assert list((tmp_path / "saved").iterdir()) == []


def test_each_process_works_in_the_precision_that_was_chosen() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    alone = fabric_alone(fabric, first=False)
    assert alone.world_size == 1 and alone.device == fabric.device and not alone.loggers
    with alone.autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
