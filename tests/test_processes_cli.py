"""The `fusion_bench` command with several processes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_runs import fusion_bench
from process_group import in_processes
from tiny_models import clip_suite
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import prepare_run, share_model
from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.run import Processes
from fusion_bench_featcal.suites import image

WORDS = (
    "method=featcal", "modelpool=clip-vit-mini_alphabets2", "fabric.accelerator=cpu",
    "print_config=false", "method.base_method=null", "method.compare_with=[]",
    f"+modelpool.models._merged_={image.path('pretrained')}", "method.presets={}",
    "method.samples_per_task=8",
)  # fmt: skip


@pytest.mark.slow
def test_command_leaves_one_model_and_one_report(tmp_path: Path) -> None:
    saved: list[CLIPVisionModel] = []
    for devices in (1, 2):
        log_dir = tmp_path / f"log{devices}"
        words = [*WORDS, f"fabric.devices={devices}", f"path.log_dir={log_dir}"]
        done = fusion_bench([*words, 'merged_model_save_path="{log_dir}/model"'], tmp_path)
        saved.append(CLIPVisionModel.from_pretrained(log_dir / "model"))
    text = done.stdout + done.stderr
    assert text.count("calibrating featcal ") == 1
    one, two = (read_run(tmp_path / f"log{devices}") for devices in (1, 2))
    assert two.row("featcal").cost["processes"] == 2
    assert two.row("featcal").cost["exchanged_bytes"] > 1e6
    for task, accuracy in one.accuracy["featcal"].items():  # of whole test sets, not of a half each
        assert two.accuracy["featcal"][task] == pytest.approx(accuracy, abs=0.01)
    assert not list(log_dir.rglob("*.part")) and (log_dir / "program_report.json").is_file()
    for pair in zip(*(model.parameters() for model in saved), strict=True):
        torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-5)


def test_other_methods_and_strategies_are_refused() -> None:
    program: Any = SimpleNamespace(fabric=SimpleNamespace(world_size=2))
    with pytest.raises(CalibrationError, match=r"in one process, not in 2: set fabric\.devices=1"):
        prepare_run(program, None)
    algorithm: Any = FeatCalAlgorithm()
    algorithm.fabric = SimpleNamespace(world_size=2, strategy=object(), _loggers=[])
    with pytest.raises(CalibrationError, match=r"needs fabric\.strategy=ddp"):
        algorithm.run(None)


def test_model_of_the_merger_is_sent_to_all_processes() -> None:
    merged: Any = clip_suite().merged
    merged.tied = torch.nn.ParameterList([next(merged.parameters())])

    def work(processes: Processes) -> dict[str, Any]:
        model = merged if processes.rank == 0 else None
        shared: Any = share_model(model, processes, torch.device("cpu"))
        assert shared.tied[0] is next(shared.parameters())
        tensors = dict(shared.named_buffers()) | shared.state_dict()
        return {name: tensor.numpy() for name, tensor in tensors.items()}

    first, second = in_processes(2, work)
    assert list(first) == list(second)
    assert all((first[name] == second[name]).all() for name in first)
