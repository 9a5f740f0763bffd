"""Mergers that read files by tensor give FusionBench's bits within a read budget."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical
from fusion_bench import BaseModelPool
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm
from tiny_models import Suite, residual_suite, t5_suite
from tiny_pools import ARITHMETIC, AVERAGE, suite_pool
from tiny_texts import t5_pool
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.source import total_bytes
from fusion_bench_featcal.fusionbench import PoolModel, PoolModels, Upstream, upstream
from fusion_bench_featcal.fusionbench.upstream import _arithmetic, _average, fill

TIES: dict[str, Any] = {"_target_": "fusion_bench.method.TiesMergingAlgorithm", "threshold": 20}
TIES |= {"scaling_factor": 0.3, "remove_keys": [], "merge_func": "sum"}


def counting_suite() -> Suite:
    """Models with integer buffers. FusionBench takes buffers whose differences sum to zero."""
    suite = residual_suite()
    models = [suite.base, suite.merged, *suite.experts.values()]
    for count, model in zip((3, 3, 1, 5), models, strict=True):
        model.register_buffer("count", torch.tensor([count, 7]))
        model.layers[1].register_buffer("ids", torch.arange(4))  # type: ignore[index, union-attr]
    return suite


SUITES = {
    "t5, untied": lambda: t5_suite(depths=(1, 1), tasks=2, untied=True),
    "integers": counting_suite,
}


@pytest.mark.parametrize("name", SUITES)
def test_merging_by_tensor_has_the_bits_of_fusion_bench(name: str):
    suite = SUITES[name]()
    models = {"_pretrained_": suite.base, **suite.experts}
    opened = {n: ExpertModel(n, InMemoryExpert(m), suite.merged) for n, m in models.items()}
    experts = [opened[task] for task in suite.experts]
    for first, merge, merger in (
        (next(iter(suite.experts)), _average, SimpleAverageAlgorithm()),
        ("_pretrained_", _arithmetic(0.3), TaskArithmeticAlgorithm(scaling_factor=0.3)),
    ):
        pool = BaseModelPool({name: copy.deepcopy(model) for name, model in models.items()})
        merged = copy.deepcopy(models[first])
        fill(merged, opened[first], experts, merge)
        assert_identical(merged, merger.run(pool))


@pytest.mark.parametrize(
    ("config", "make"), [(ARITHMETIC, lambda _: suite_pool()), (AVERAGE, t5_pool)]
)
def test_files_are_merged_as_they_load(config: Any, make: Any, tmp_path: Path, caplog, monkeypatch):
    def merged() -> nn.Module:
        return Upstream(config, PoolModels(make(tmp_path))).merged_model(None)

    caplog.set_level(logging.INFO)
    from_files = merged()
    assert caplog.text.count("tensor by tensor from files") == 1
    monkeypatch.setattr(upstream, "merged_from_files", lambda *_: None)
    assert_identical(from_files, merged())
    assert caplog.text.count("tensor by tensor from files") == 1


def bytes_of_experts(pool: Any) -> int:
    sources = [PoolModel(pool, name).files for name in ("mini_greek", "mini_latin")]
    return sum(map(total_bytes, filter(None, sources)))


@pytest.mark.parametrize(("base_method", "budget"), [(AVERAGE, "1MB"), (TIES, "100%")])
def test_a_budget_that_merging_exceeds_is_refused_before_anything_is_loaded(
    base_method: Any, budget: str, monkeypatch: pytest.MonkeyPatch
):
    pool = suite_pool()
    monkeypatch.setattr(type(pool), "load_model", lambda *_: pytest.fail("a model was loaded"))
    message = (
        rf"method\.expert_read_budget={budget} cannot be kept: \w+ reads every expert whole "
        rf"\({bytes_of_experts(pool)} bytes\).*Give more bytes than that"
    )
    with pytest.raises(CalibrationError, match=message):
        FeatCalAlgorithm(base_method=base_method, expert_read_budget=budget).run(pool)


def test_merger_and_calibration_keep_a_budget_together():
    pool, results = suite_pool(), []
    whole = bytes_of_experts(pool)
    few: dict[str, Any] = {"samples_per_task": 2, "presets": {}, "mix_alpha": 0.0}
    method: Any = FeatCalAlgorithm(
        base_method=ARITHMETIC, expert_read_budget=whole + whole // 3, **few
    )
    calibrate = method._calibrate
    method._calibrate = lambda *args: results.append(calibrate(*args)) or results[-1]
    method.run(pool)
    ((result, cost),) = results
    reads = result.reads
    of_experts = sum(reads["experts"].values())
    assert reads["upstream"]["experts"] == whole and reads["upstream"]["base"] > 0
    assert cost.more["expert_bytes"] == whole + of_experts
    assert reads["plan"]["limit"] == whole // 3 >= of_experts > 0
    assert reads["plan"]["not_read"] and reads["budget"] == whole + whole // 3
