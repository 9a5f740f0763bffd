"""`featcal plan` from the words of a run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_mirror import Mirror
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.fusionbench.plan_run import plan_run
from fusion_bench_featcal.models.plan import Download, Plan, check

MINI = ["modelpool=clip-vit-mini_TA6"]


def plan_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_suite_and_its_overrides(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    plan = plan_of(capsys, *MINI, "method=featcal")
    assert plan["downloads"] == [] and plan["rows"] == {"featcal": 1, "featcal_plus": 1}
    assert 5 * plan["output"] < plan["read"] < 6 * plan["output"]  # the base has a head of text
    halved = plan_of(capsys, *MINI, "method.expert_read_budget=50%")
    assert halved["read"] == plan["read"] // 2
    assert main(["plan", *MINI, "method.checkpoint_dir=blocks"]) == 0
    screen = capsys.readouterr().out
    assert "read from experts, at most" in screen and "free in blocks" in screen


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (["method=surgery"], {"SurgeryAlgorithm": 1}),
        (["method.seed=1,2", "method.samples_per_task=8,16,32"],
         {"featcal": 6, "featcal_plus": 6}),
        (["method=compare", "method.upstreams=[task_arithmetic,ties_merging]", "method.alone=[lot]",
          "method.post_merging=[featcal]", "method.seed=1,2,3"],
         {"base": 3, "experts": 3, "task_arithmetic": 3, "featcal": 6, "ties_merging": 3,
          "lot": 3}),
    ],
)  # fmt: skip
def test_rows_of_comparisons_and_sweeps_are_counted(words: list[str], rows: dict[str, int]):
    assert plan_run([*MINI, *words]).rows == rows


def test_downloads_are_read_from_the_hubs_metadata_and_unknown_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    sizes: Any = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32}
    config = CLIPVisionConfig(hidden_size=32, intermediate_size=64, patch_size=16, **sizes)
    for name in ("base", "one"):
        CLIPVisionModel(config).save_pretrained(tmp_path / name)
    weights = (tmp_path / "one" / "model.safetensors").stat().st_size
    models = f"{{_pretrained_: {tmp_path}/base, one: {tmp_path}/one, two: some/model}}"
    words = [*MINI, "~modelpool.models", f"+modelpool.models={models}", "~modelpool.train_datasets",
             "+modelpool.train_datasets={one: {path: some/data}, two: other/data}"]  # fmt: skip
    offline = plan_run(words)
    downloads = [Download(name) for name in ("some/model", "some/data", "other/data")]
    assert offline.downloads == (*downloads,) and (offline.read, offline.output) == (None, weights)

    with Mirror() as mirror:
        files = {"config.json": b"{}", "model.safetensors": b"0" * 70, "tf_model.h5": b"0" * 900}
        mirror.add("some/model", files)
        mirror.add(
            "datasets/some/data", {"a.parquet": b"0" * 30, "b.parquet": b"0", "README.md": b"0"}
        )
        code = (
            "import sys, json\n"
            "from fusion_bench_featcal.fusionbench.plan_run import plan_run\n"
            f"plan = plan_run({words!r})\n"
            "print(json.dumps([plan.as_dict(), 'torch' in sys.modules]))"
        )
        environment = mirror.environment(tmp_path / "home")
        text = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    plan, has_torch = json.loads(text)
    assert [tuple(entry.values()) for entry in plan["downloads"]] == [
        ("some/model", 2, 72), ("some/data", 2, 31), ("other/data", None, None)
    ]  # fmt: skip
    assert plan["read"] == weights + 70
    assert not has_torch


def test_a_model_without_room_on_its_disk_is_refused(tmp_path: Path):
    plan = Plan(output=1, folder=str(tmp_path / "new"))
    check(plan)
    with pytest.raises(CalibrationError, match=r"of disk space in .*new, .* are free"):
        check(replace(plan, output=2**62))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("modelpool=clip-vit-mini_TA7", "no config modelpool/clip-vit-mini_TA7 (nearest: 'clip-vi"),
        ("taskpool=clip-vit-mini_TA7", "no config taskpool/clip-vit-mini_TA7 (nearest: 'clip-vit-"),
        ("method=fetcal", "there is no config method/fetcal (nearest: 'featcal')"),
        ("method@method.base_method=task_arithmetics", "(nearest: 'task_arithmetic')"),
        ("method.base_method=task_arithmetic", "method.base_method must be null or a method's con"),
        ("method.mix_alfa=1", "method.mix_alfa is unknown (nearest: 'mix_alpha')"),
        ("+method.mix_alfa=1", "method.mix_alfa is unknown (nearest: 'mix_alpha')"),
        ("method.mix_alpha=2", "method.mix_alpha must be a finite number"),
        ("method.save=featcal_plsu", "method.save must be a row that this run makes"),
        ("method.presets={a: {mix_alfa: 1}}", "method.presets.a.mix_alfa is unknown"),
        ("method.calibration_data={mini_nmist: a}", "mini_nmist is unknown (nearest: 'mini_"),
        ("method.calibration_data={mini_mnist: a.csv}", "mini_mnist=a.csv: there is no such file"),
        ("modelpool.models.mini_mnist=/no/folder", "modelpool.models.mini_mnist=/no/folder: there"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_by_name(
    word: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", *MINI, word]) == 2
    assert message in capsys.readouterr().err
