"""The shipped small T5 and Llama, loaded through FusionBench's own pools from the shipped YAML."""

import json
from pathlib import Path
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from fusion_bench.constants.paths import DEFAULT_CONFIG_PATH
from fusion_bench.method import SimpleAverageAlgorithm
from fusion_bench.utils import instantiate
from hydra import compose, initialize_config_dir
from transformers import LlamaForCausalLM, T5ForConditionalGeneration

from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.suites import text

CLASSES = {"flan-t5-mini": T5ForConditionalGeneration, "llama-mini": LlamaForCausalLM}
TASK = "clinc_auto"


@pytest.fixture(params=text.SUITES)
def suite(request):
    return request.param


def composed(suite: str, *overrides: str):
    with initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        return compose("fabric_model_fusion", [f"modelpool={suite}_TA6", *overrides])


def pool_of(suite: str) -> Any:
    return instantiate(composed(suite).modelpool, _recursive_=False)


def measured(suite: str) -> dict[str, Any]:
    return json.loads(Path(text.path(suite, "MEASURED.json")).read_text(encoding="utf-8"))


def test_each_yaml_names_its_tasks_everywhere(suite):
    config = composed(suite, f"taskpool={suite}_TA6")
    assert config.taskpool == config.modelpool.default_taskpool
    pool = pool_of(suite)
    assert tuple(pool.model_names) == text.TA6 == tuple(config.taskpool.test_datasets)
    for task in text.TA6:
        entry = pool._models[task]
        folder = entry if isinstance(entry, str) else entry.pretrained_model_name_or_path
        assert Path(folder) == Path(text.path(suite, task))
        sets = {"calibration": pool._train_datasets[task], "test": pool._test_datasets[task]}
        assert {split: (chosen.name, chosen.split) for split, chosen in sets.items()} == {
            split: (task, split) for split in sets
        }
        assert config.taskpool.test_datasets[task] == sets["test"]


def test_the_pool_loads_the_base_and_all_experts(suite):
    pool = pool_of(suite)
    base = pool.load_model("_pretrained_")
    embedding = base.get_input_embeddings().weight
    assert base.get_output_embeddings().weight is embedding
    for task in text.TA6:
        expert: Any = pool.load_model(task)
        assert isinstance(expert, CLASSES[suite])
        assert {p.dtype for p in expert.parameters()} == {torch.float32}
        assert all(torch.isfinite(p).all() for p in expert.parameters())
        assert torch.equal(expert.get_input_embeddings().weight, embedding)
        moved = zip(expert.parameters(), base.parameters(), strict=True)
        assert any((after - before).abs().max() > 1e-3 for after, before in moved)


def test_the_task_pool_measures_what_the_builder_measured(suite):
    merged = SimpleAverageAlgorithm(show_pbar=False).run(pool_of(suite))
    taskpool = instantiate(composed(suite).modelpool.default_taskpool, _recursive_=False)
    found = evaluate(taskpool, merged, name="merged", tasks=[TASK])
    expected = measured(suite)["accuracies"]["simple_average"][TASK]
    # another machine may round a close call the other way
    assert found.accuracy[TASK] == pytest.approx(expected, abs=2.01 / 450)


def test_experts_are_good_and_plain_merges_lose(suite):
    record = measured(suite)
    rows = record["accuracies"]
    experts = rows["experts"]["average"]
    assert experts >= 0.88 and rows["base"]["average"] < 0.5
    for merge in ("simple_average", "task_arithmetic"):
        assert rows[merge]["average"] <= experts - 0.10
    assert record["seed"] == 0
