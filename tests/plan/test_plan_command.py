"""`featcal plan` from the words of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench import run_request

MINI = ["modelpool=clip-vit-mini_TA6"]


def test_suite_and_its_overrides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ["plan", *MINI, "method=featcal", "method.samples_per_task=32"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["tasks"], plan["samples"], plan["family"]) == (6, 32, "clip")
    assert {"host", "gpu", "parts", "storage", "fetched", "read", "base_read", "disk"} <= set(plan)
    assert main([*words, "fabric.devices=2"]) == 0
    screen = capsys.readouterr().out
    assert "6 tasks x 32 samples" in screen and "2 processes. Sizes are of the busiest" in screen
    assert "features of all samples (device)" in screen and "read from experts" in screen


def test_network_whose_config_names_no_image_size(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "modelpool=resnet-mini_TA3", "--json"]
    features = []
    for side in ("28", "56"):
        assert main([*words, "--length", side]) == 0
        features.append(json.loads(capsys.readouterr().out)["parts"]["features"])
    assert 3.5 < features[1] / features[0] < 4.5
    assert main(words) == 2
    assert "names no image size: give the side" in capsys.readouterr().err


def test_requests_of_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Headers give the experts' precision. Models that are not local are fetched."""
    sizes: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    config = CLIPVisionConfig(hidden_size=32, intermediate_size=64, patch_size=16, **sizes)
    for name in ("base", "one", "two"):
        model: Any = CLIPVisionModel(config)
        model.to(torch.float16).save_pretrained(tmp_path / name)
    models = f"{{_pretrained_: {tmp_path}/base, one: {tmp_path}/one, two: {tmp_path}/two}}"
    words = [*MINI, "~modelpool.models", f"+modelpool.models={models}"]
    monkeypatch.setenv("FOUR", "4")
    request = run_request([*words, "fabric.devices=${oc.env:FOUR}"])
    assert (request.tasks, request.itemsize, request.whole, request.fetches) == (2, 2, 0, 0)
    assert request.processes == 4
    assert run_request([*words, "method.stream_experts=false"]).whole == 3
    assert run_request([*words, "modelpool.models.one=some/model"]).fetches == 1
    (tmp_path / "two" / "model.safetensors").unlink()
    assert run_request(words).whole == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("method.mix_alpha=2", "method.mix_alpha must be"),
        ("modelpool.models._pretrained_=nowhere", "Llama-3.2-3B-Instruct, clip-vit-base-patch16"),
        ("method.expert_read_budget=50%",
         "expert_read_budget=50% cannot be kept: task_arithmetic reads every expert whole"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *MINI, words]) == 2
    assert message in capsys.readouterr().err
