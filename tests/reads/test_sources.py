"""Sources give tensors as torch does, and a run reads no more of the experts than its budget."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Overheard, assert_identical, run_fast
from safetensors.torch import load_file, save_file, save_model
from tiny_models import Suite, clip_suite, t5_model, t5_suite
from tiny_pools import ARITHMETIC, AVERAGE, suite_pool
from tiny_texts import t5_pool
from torch import nn

from fusion_bench_featcal import CalibrationError, Paper, Plus, SafetensorsExpert
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench import upstream
from fusion_bench_featcal.fusionbench.method import run_method
from fusion_bench_featcal.fusionbench.pool_models import PoolModels


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2,))


def test_files_give_the_tensors_and_sizes_of_load_file(tmp_path: Path):
    t5_model().save_pretrained(tmp_path / "t5", max_shard_size="5KB")  # type: ignore[operator]
    more = {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "thin": torch.empty(3, 0)}
    for dtype in (torch.bool, torch.int64, torch.bfloat16):
        more[f"{dtype}"] = torch.arange(12).reshape(3, 2, 2).to(dtype)
    (tmp_path / "more").mkdir()
    save_file(more, tmp_path / "more" / "model.safetensors")
    for folder in (tmp_path / "t5", tmp_path / "more"):
        tensors = {}
        for file in folder.rglob("*.safetensors"):
            tensors |= load_file(file)
        source = SafetensorsExpert(folder)
        assert source.names() == set(tensors)
        for name, tensor in tensors.items():
            sizes = source.shape(name), source.nbytes(name)
            assert sizes == (tuple(tensor.shape), tensor.nbytes)
            whole = source.tensor(name)
            assert whole.dtype == tensor.dtype and torch.equal(whole, tensor)
            for start, stop in ((0, 2), (1, 9)) if tensor.ndim else ():
                assert torch.equal(source.rows(name, start, stop), tensor[start:stop])


SUITES: dict[str, tuple[Any, Any]] = {
    "weights alone": (small_clip, Paper(mix_alpha=0.0)),
    "plus": (small_clip, Plus()),
    "t5": (lambda: t5_suite(depths=(1, 1)), Paper()),
}


@pytest.mark.parametrize("name", SUITES)
def test_experts_in_files_and_in_memory_give_the_same_bits_and_counts(name: str, tmp_path: Path):
    make, rule = SUITES[name]
    suite = make()
    in_memory = run_fast(suite, rule=rule)
    reads = in_memory.reads
    assert sum(reads["experts"].values()) == reads["plan"]["full"] == reads["plan"]["bytes"]
    assert (reads["plan"]["not_read"], reads["plan"]["limit"]) == ({}, None)
    files: Any = {task: tmp_path / f"{task}.safetensors" for task in suite.experts}
    for task, expert in suite.experts.items():
        save_model(expert, str(files[task]))
    suite.experts = {task: SafetensorsExpert(file) for task, file in files.items()}
    in_files = run_fast(suite, rule=rule)
    assert_identical(in_files.model, in_memory.model)
    for task, read in in_files.reads["experts"].items():
        assert 0 < read <= reads["experts"][task]  # files have tied tensors once


@pytest.mark.parametrize(("name", "share"), [("weights alone", 30), ("plus", 60), ("t5", 10)])
def test_a_run_with_a_budget_is_the_run_with_merged_weights_in_the_experts(name: str, share: int):
    make, rule = SUITES[name]
    suite = make()
    whole, overheard = suite.experts, {t: Overheard(e) for t, e in suite.experts.items()}
    suite.experts = overheard
    result = run_fast(suite, rule=rule, expert_read_budget=f"{share}%")
    plan = result.reads["plan"]
    read = sum(s.nbytes(tensor) for s in overheard.values() for tensor in set(s.read))
    assert read == sum(result.reads["experts"].values()) == plan["bytes"] <= plan["limit"]
    assert plan["limit"] == plan["full"] * share // 100 and plan["not_read"]
    suite.experts = {task: copy.deepcopy(expert) for task, expert in whole.items()}
    merged = suite.merged.state_dict()
    for task, modules in plan["not_read"].items():
        for key, value in suite.experts[task].state_dict().items():
            if key.rpartition(".")[0] in modules:
                value.copy_(merged[key])
    assert_identical(result.model, run_fast(suite, rule=rule).model)


def test_a_budget_is_spent_in_forward_order_and_holds_one_module():
    plan = run_fast(clip_suite(tasks=1, sizes=(2,)), expert_read_budget=12160).reads["plan"]
    first, *others = (name.split("layers.")[1] for name in plan["not_read"]["task_0"])
    assert (first, plan["bytes"]) == ("0.mlp.fc1", 10560)  # fc1 has 2080 bytes, norms 192
    assert len(others) == 10 and {"0.layer_norm2", "1.layer_norm2"} < {*others}
    with pytest.raises(CalibrationError, match="expert_read_budget=1 is smaller than one module"):
        run_fast(small_clip(), expert_read_budget=1)
    for amount, limit in (("9KB", 9000), ("0.1GiB", 107374182)):
        plan = run_fast(small_clip(), expert_read_budget=amount).reads["plan"]
        assert plan["limit"] == limit, plan


@pytest.mark.parametrize(
    ("config", "make"), [(ARITHMETIC, lambda _: suite_pool()), (AVERAGE, t5_pool)]
)
def test_files_are_merged_as_they_load(config: Any, make: Any, tmp_path: Path, caplog, monkeypatch):
    def merged() -> nn.Module:
        return upstream.Upstream(config, PoolModels(make(tmp_path))).merged_model(None)

    caplog.set_level(logging.INFO)
    from_files = merged()
    assert caplog.text.count("tensor by tensor from files") == 1
    monkeypatch.setattr(upstream, "merge_from_files", lambda *_: None)
    assert_identical(from_files, merged())
    assert caplog.text.count("tensor by tensor from files") == 1


def bytes_of_experts(pool: Any) -> int:
    experts = PoolModels(pool).experts.values()
    return sum(file.nbytes(n) for e in experts if (file := e.files) for n in file.names())


def test_a_budget_that_merging_exceeds_is_refused_before_anything_is_loaded(monkeypatch):
    pool = suite_pool()
    monkeypatch.setattr(type(pool), "load_model", lambda *_: pytest.fail("a model was loaded"))
    message = (
        rf"expert_read_budget=1MB is too small: \w+ reads every expert completely "
        rf"\({bytes_of_experts(pool)} bytes\).*Give more bytes than that"
    )
    with pytest.raises(CalibrationError, match=message):
        FeatCalAlgorithm(base_method=AVERAGE, expert_read_budget="1MB").run(pool)


def test_merger_and_calibration_keep_a_budget_together():
    pool = suite_pool()
    whole = bytes_of_experts(pool)
    few: dict[str, Any] = {"samples_per_task": 2, "presets": {}, "mix_alpha": 0.0}
    method: Any = FeatCalAlgorithm(
        base_method=ARITHMETIC, expert_read_budget=whole + whole // 3, **few
    )
    inputs = method.inputs(pool)
    method.open(inputs)
    merged, calibration = inputs.upstream.merged_model(None), method.methods["featcal"]
    result = run_method(calibration, merged, inputs)
    reads = json.loads(calibration.facts("featcal", result).files["reads.json"])
    assert reads["upstream"]["experts"] == whole and reads["upstream"]["base"] > 0
    assert reads["plan"]["limit"] == whole // 3 >= sum(reads["experts"].values()) > 0
    assert reads["plan"]["not_read"] and reads["budget"] == whole + whole // 3
