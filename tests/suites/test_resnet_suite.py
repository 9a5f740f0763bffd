"""The bundled ResNet: built, loaded through FusionBench's pools, and repaired by the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import resnet_builder
import torch
from build_suite import build
from cli_runs import fusion_bench
from configs import composed
from fusion_bench.method import SimpleAverageAlgorithm
from safetensors.torch import load_file
from test_bundled_pools import measured, pool_of, task_pool_of
from transformers import ResNetForImageClassification

from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.fusionbench.program import run_merger
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.checksums import check

NAME = "resnet-mini_TA3"
SMALL = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}


@pytest.fixture
def fewer_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = image.load_split

    def load(name: str, split: str) -> Any:
        pictures = whole(name, split)
        pictures.grey, pictures.labels = pictures.grey[:8], pictures.labels[:8]
        return pictures

    monkeypatch.setattr(image, "load_split", load)


def test_the_builder_makes_checkpoints_that_plain_transformers_loads(
    fewer_pictures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resnet_builder.ResNetBuilder, "size", SMALL)
    recipe = resnet_builder.Recipe(images_per_task=4, expert_batch=4)
    phases = {p: replace(getattr(recipe, p), steps=2) for p in ("pretraining", "finetuning")}
    tasks = image.RESNET3[:2]
    build(tmp_path, "resnet-mini", 1, tasks=tasks, recipe=replace(recipe, **phases))
    assert check(tmp_path) == []
    base = load_file(tmp_path / "pretrained" / "model.safetensors")
    for task in tasks:
        stored = load_file(tmp_path / task / "model.safetensors")
        expert = ResNetForImageClassification.from_pretrained(tmp_path / task)
        for name, value in expert.state_dict().items():
            assert torch.equal(value, stored[name].to(value.dtype)), name
        kept = {name for name, value in stored.items() if torch.equal(value, base[name])}
        assert kept == {"classifier.1.weight", "classifier.1.bias"}


def test_task_pool_measures_what_the_builder_measured() -> None:
    pool, taskpool = pool_of(NAME), task_pool_of(NAME)
    model = SimpleAverageAlgorithm(show_pbar=False).run(pool)
    task = "mini_notmnist"
    found = evaluate(taskpool, model, name="simple_average", tasks=[task])
    number = len(pool.load_test_dataset(task))
    off_by = abs(found.accuracy[task] - measured(NAME)["simple_average"][task]) * number
    assert off_by <= 2.01


@pytest.mark.parametrize(
    "words",
    [
        ("method=task_arithmetic",),
        ("method=featcal_baselines/regmean", "method.samples_per_task=8"),
    ],
)
def test_mergers_take_batch_norms_counts(words: tuple[str, ...]) -> None:
    config = composed(f"modelpool={NAME}", *words).method
    pool = pool_of(NAME)
    merged = run_merger(None, config, pool, "method.base_method")
    kinds = {name: value.dtype for name, value in merged.state_dict().items()}
    counts = {kinds[name] for name in kinds if name.endswith("num_batches_tracked")}
    assert counts == {torch.int64}
    assert all(torch.isfinite(value).all() for value in merged.state_dict().values())
    assert "load_model" not in vars(pool)  # the pool itself is as it was


@pytest.mark.slow
def test_the_command_repairs_the_merged_network(tmp_path: Path) -> None:
    words = ["method=featcal", f"modelpool={NAME}", "method.samples_per_task=64"]
    run = fusion_bench([*words, f"path.log_dir={tmp_path}/log"], tmp_path)
    report = Report.load(tmp_path / "log")
    recovered = report.recovered_gap
    for row in ("featcal", "featcal:plus", "featcal:batch_norm_only"):
        assert row in run.stdout
    assert (recovered["featcal:batch_norm_only"] or 0) > 0.2
    assert (recovered["featcal:plus"] or 0) > 0.5
    settings = json.loads(json.dumps(report.settings["featcal:batch_norm_only"]))
    assert settings["modules"] == ["normalization"]

    method = "method=featcal_baselines/batch_norm_statistics"
    alone = [method, f"modelpool={NAME}", "method.samples_per_task=64"]
    fusion_bench([*alone, f"path.log_dir={tmp_path}/alone"], tmp_path)
    own = Report.load(tmp_path / "alone").rows["batch_norm_statistics"]
    assert own == report.rows["featcal:batch_norm_only"]
