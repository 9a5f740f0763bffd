"""Upstream mergers that go through files tensor by tensor make FusionBench's own bits."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import write_adapter
from calibrations import assert_identical
from fusion_bench import BaseModelPool
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm
from image_pools import ARITHMETIC, AVERAGE, suite_pool
from safetensors.torch import save_file
from text_pools import causal_pool, llamas, t5_pool
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite, t5_suite
from tiny_open_clip import tower_suite
from tiny_texts import TASKS, t5_model
from torch import nn

from fusion_bench_featcal import CalibrationError, SafetensorsExpert
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.fusionbench.fusing import _arithmetic, _average, fill
from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.suites import image


def counting_suite() -> Suite:
    """Models with integer buffers; FusionBench takes those whose differences are zero in sum."""
    suite = residual_suite()
    models = [suite.base, suite.merged, *suite.experts.values()]
    for seen, model in zip((3, 3, 1, 5), models, strict=True):
        model.register_buffer("seen", torch.tensor([seen, 7]))
        model.layers[1].register_buffer("ids", torch.arange(4))  # type: ignore[index, union-attr]
    return suite


def small_t5() -> Suite:
    return t5_suite(depths=(1, 1), tasks=2, untied=True)


SUITES: dict[str, Callable[[], Suite]] = {
    "clip": lambda: clip_suite(tasks=2, sizes=(2,)),
    "t5, untied": small_t5,
    "gpt2": gpt2_suite,
    "open_clip": tower_suite,
    "integers": counting_suite,
}


@pytest.mark.parametrize("name", SUITES)
def test_merging_tensor_by_tensor_has_fusion_benchs_bits(name: str):
    suite = SUITES[name]()
    models = {"_pretrained_": suite.base, **suite.experts}
    opened = {n: ExpertModel(n, InMemoryExpert(m), suite.merged) for n, m in models.items()}
    experts = [opened[task] for task in suite.experts]
    for first, merge, upstream in (
        (next(iter(suite.experts)), _average, SimpleAverageAlgorithm()),
        ("_pretrained_", _arithmetic(0.3), TaskArithmeticAlgorithm(scaling_factor=0.3)),
    ):
        pool = BaseModelPool({name: copy.deepcopy(model) for name, model in models.items()})
        merged = copy.deepcopy(models[first])
        fill(merged, opened[first], experts, merge)
        assert_identical(merged, upstream.run(pool))


def test_values_that_are_not_finite_and_counts_of_batches():
    model = nn.BatchNorm1d(2)
    expert = ExpertModel("a", InMemoryExpert(model), model)
    with pytest.raises(CalibrationError, match=r"'weight' is NaN or infinite.*base_method"):
        fill(copy.deepcopy(model), expert, [expert], lambda first, others: first / 0.0)
    merged = copy.deepcopy(model)
    assert merged.num_batches_tracked is not None
    merged.num_batches_tracked.fill_(3)
    fill(merged, expert, [expert], _average)
    assert merged.num_batches_tracked == 0
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.weight[0] = float("nan")
    other = ExpertModel("b", InMemoryExpert(broken), model)
    with pytest.raises(CalibrationError, match=r"expert 'b': tensor 'weight' has NaN"):
        fill(merged, expert, [expert, other], _average)


def merged_by(config: Any, pool: Any, *, from_files: bool = True) -> nn.Module:
    return Upstream(config, PoolModels(pool)).merged_model(None, from_files=from_files)


@pytest.mark.parametrize("config", [AVERAGE, ARITHMETIC], ids=["average", "arithmetic"])
@pytest.mark.parametrize("make", [lambda _: suite_pool(), t5_pool], ids=["clip", "t5"])
def test_files_are_merged_as_they_load(make: Any, config: Any, tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    merged = merged_by(config, make(tmp_path))
    assert "tensor by tensor from files" in caplog.text
    caplog.clear()
    expected = merged_by(config, make(tmp_path), from_files=False)
    assert "tensor by tensor" not in caplog.text
    assert_identical(merged, expected)
    assert type(merged) is type(expected)


def other_dtype(folder: Path) -> Any:
    """A pool with an expert stored in another precision than the rest."""
    source = SafetensorsExpert(image.path("mini_greek"))
    tensors = {name: source.tensor(name).float() for name in source.names()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = Path(image.path("mini_greek")) / "config.json"
    (folder / "config.json").write_text(config.read_text())
    models = {"_pretrained_": image.path(), "mini_greek": str(folder)}
    return suite_pool(models=models | {"mini_latin": image.path("mini_latin")})


def other_config(folder: Path) -> Any:
    """A pool with an expert whose config names another precision."""
    pool = other_dtype(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return pool


def named_dtype(_: Path) -> Any:
    """A pool that loads one expert in another precision."""
    load = {
        "_target_": "transformers.CLIPVisionModel.from_pretrained",
        "pretrained_model_name_or_path": image.path("mini_greek"),
        "torch_dtype": "float16",
    }
    models = {"_pretrained_": image.path(), "mini_greek": load}
    return suite_pool(models=models | {"mini_latin": image.path("mini_latin")})


def lora_pool(folder: Path) -> Any:
    """A pool whose experts are LoRA adapters."""
    pool = t5_pool(folder)
    base = pool._models["_pretrained_"]["pretrained_model_name_or_path"]
    for task in TASKS:
        adapter = write_adapter(folder / f"{task}-lora", t5_model(), 0)
        pool._models[task] = {
            "_target_": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
            "base_model_path": base,
            "peft_model_path": str(adapter),
        }
    return pool


def in_memory(_: Path) -> Any:
    """A pool of models that are in no files."""
    return BaseModelPool(dict(_pretrained_=nn.Linear(2, 2), a=nn.Linear(2, 2)))


def vocabulary_pool(folder: Path) -> Any:
    """A pool of Llamas whose vocabularies differ."""
    return causal_pool(llamas(folder, {"two": 30}), vocabulary="common_rows")


@pytest.mark.parametrize(
    ("config", "pool"),
    [
        ({"_target_": "fusion_bench.method.TiesMergingAlgorithm"}, None),
        (AVERAGE | {"weights": [1]}, None),
        (ARITHMETIC | {"scaling_factor": "0.3"}, None),
        (ARITHMETIC, in_memory),
        (ARITHMETIC, named_dtype),
        (ARITHMETIC, other_dtype),
        (ARITHMETIC, other_config),
        (ARITHMETIC, lora_pool),
        (ARITHMETIC, vocabulary_pool),
    ],
)
def test_merger_that_cannot_read_files_loads_models(
    config: Any, pool: Any, tmp_path: Path, monkeypatch
):
    ran: list[Any] = []
    linear = nn.Linear(1, 1)
    run_merger = "fusion_bench_featcal.fusionbench.upstream.run_merger"
    monkeypatch.setattr(run_merger, lambda *given: ran.append(given) or linear)
    chosen = suite_pool() if pool is None else pool(tmp_path / "other")
    assert merged_by(config, chosen) is linear and len(ran) == 1
