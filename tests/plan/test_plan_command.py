"""`featcal plan` from the words of a run."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import run_fast
from tiny_models import decoder_suite
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings, InMemoryExpert
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench.plan_run import plan_run
from fusion_bench_featcal.models.plan import check, plan_of

MINI = ["modelpool=clip-vit-mini_TA6"]


def test_suite_and_its_overrides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *MINI, "method=featcal", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["tasks"], plan["family"], plan["fetched"]) == (6, "clip", 0)
    assert 0 < plan["base_read"] < plan["read"] <= 6 * plan["output"]
    assert main(["plan", *MINI, "method.checkpoint_dir=blocks"]) == 0
    screen = capsys.readouterr().out
    assert "6 tasks" in screen and "read from experts" in screen and "free in blocks" in screen


def test_plans_of_pools(tmp_path: Path):
    """Headers give the experts' precision. Models that are not local are fetched."""
    sizes: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    config = CLIPVisionConfig(hidden_size=32, intermediate_size=64, patch_size=16, **sizes)
    for name in ("base", "one", "two"):
        model: Any = CLIPVisionModel(config)
        model.to(torch.float16).save_pretrained(tmp_path / name)
    models = f"{{_pretrained_: {tmp_path}/base, one: {tmp_path}/one, two: {tmp_path}/two}}"
    words = [*MINI, "~modelpool.models", f"+modelpool.models={models}"]
    plan = plan_run(words)
    assert (plan.tasks, plan.fetched) == (2, 0)
    assert plan.output == 2 * sum(p.numel() for p in CLIPVisionModel(config).parameters())
    assert plan_run([*words, "modelpool.models.two=some/model"]).fetched == plan.output


@pytest.mark.parametrize("budget", [None, "50%"])
def test_a_plan_is_what_a_run_reads(budget: str | None):
    suite = decoder_suite()
    sources: Any = {task: InMemoryExpert(expert) for task, expert in suite.experts.items()}
    result = run_fast(suite, expert_read_budget=budget)
    settings = FeatCalSettings(expert_read_budget=budget)
    plan, reads = plan_of(suite.merged, settings, list(sources)), result.reads
    assert (plan.read, plan.base_read) == (sum(reads["experts"].values()), reads["base"])


def test_a_model_without_room_on_its_disk_is_refused(tmp_path: Path):
    plan = plan_of(decoder_suite().merged, FeatCalSettings(), ["a"], out=tmp_path / "new")
    check(plan)
    with pytest.raises(CalibrationError, match=r"of disk space in .*new, 0 KiB are free"):
        check(replace(plan, free=5))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("method.mix_alpha=2", "method.mix_alpha must be"),
        ("modelpool.models._pretrained_=nowhere", "_pretrained_=nowhere: there is no such file"),
        ("method.expert_read_budget=50%",
         "expert_read_budget=50% cannot be kept: task_arithmetic reads every expert whole"),
    ],
)  # fmt: skip
def test_mistakes_are_named(words: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *MINI, words]) == 2
    assert message in capsys.readouterr().err
