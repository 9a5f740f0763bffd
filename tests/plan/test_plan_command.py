"""`featcal plan` from the words of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench.plan_run import run_request


def test_suite_and_its_overrides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "modelpool=clip-vit-mini_TA6", "method=featcal", "method.samples_per_task=32"]
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["tasks"], plan["samples"], plan["family"]) == (6, 32, "clip")
    assert {"host", "gpu", "parts", "storage", "fetched", "read", "base_read", "disk"} <= set(plan)
    assert main([*words, "fabric.devices=2"]) == 0
    shown = capsys.readouterr().out
    assert "6 tasks x 32 samples" in shown and "2 processes. Sizes are of the busiest one" in shown


def test_network_whose_config_names_no_image_size(capsys: pytest.CaptureFixture[str]):
    words = ["plan", "modelpool=resnet-mini_TA3", "--json"]
    features = []
    for side in ("28", "56"):
        assert main([*words, "--length", side]) == 0
        features.append(json.loads(capsys.readouterr().out)["parts"]["features"])
    assert 3.5 < features[1] / features[0] < 4.5
    assert main(words) == 2
    assert "names no image size: give the side" in capsys.readouterr().err


def write_experts(folder: Path, dtype: torch.dtype) -> list[str]:
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=32,
        patch_size=16,
    )
    for name in ("base", "one", "two"):
        model: Any = CLIPVisionModel(config)
        model.to(dtype).save_pretrained(folder / name)
    models = f"{{_pretrained_: {folder}/base, one: {folder}/one, two: {folder}/two}}"
    return ["modelpool=clip-vit-mini_TA6", "~modelpool.models", f"+modelpool.models={models}"]


def test_requests_of_pools(tmp_path: Path):
    """Headers tell the experts' precision; models that are not here are fetched."""
    words = write_experts(tmp_path, torch.float16)
    request = run_request(words)
    assert (request.tasks, request.itemsize, request.whole, request.fetches) == (2, 2, 0, 0)
    assert run_request([*words, "method.stream_experts=false"]).whole == 3
    assert run_request([*words, "modelpool.models.one=some/model"]).fetches == 1
    alone = ["~modelpool.models._pretrained_", "method.anchor_rho=1"]
    assert run_request([*words, *alone]).tasks == 2
    (tmp_path / "two" / "model.safetensors").unlink()
    assert run_request(words).whole == 1
    bundled = ["modelpool=flan-t5-base_glue", "method=featcal/paper_flan_t5"]
    assert run_request(bundled).fetches == 9


@pytest.mark.parametrize(
    ("words", "processes"),
    [("=2", 2), ("=[0,1,2]", 3), ("=auto", 1), ("=${oc.env:FOUR}", 4)],
)
def test_processes_are_those_that_fabric_would_start(
    words: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FOUR", "4")
    request = run_request([*write_experts(tmp_path, torch.float32), f"fabric.devices{words}"])
    assert request.processes == processes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("modelpool=nothing_like_it", "nothing_like_it"),
        ("method.mix_alpha=2", "method.mix_alpha must be"),
        ("modelpool.models._pretrained_=nowhere", "Llama-3.2-3B-Instruct, clip-vit-base-patch16"),
        ("modelpool=open-clip-vit-mini_TA6", "names no folder or hub id"),
        ("method.modules=[nothing]", "matches no module"),
        ("method.family=llama", "no decoder layers"),
        ("method.expert_read_budget=50%",
         "expert_read_budget=50% cannot be kept: task_arithmetic reads every expert whole"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    pool = [] if words.startswith("modelpool=") else ["modelpool=clip-vit-mini_TA6"]
    assert main(["plan", *pool, words]) == 2
    assert message in capsys.readouterr().err
