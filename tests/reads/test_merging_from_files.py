"""Upstream mergers that read files by tensor give FusionBench's bits within a read budget."""

import copy
import logging
from collections.abc import Callable
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
EXPERTS = ("mini_greek", "mini_latin")


def counting_suite() -> Suite:
    """Models with integer buffers. FusionBench takes buffers whose differences sum to zero."""
    suite = residual_suite()
    models = [suite.base, suite.merged, *suite.experts.values()]
    for count, model in zip((3, 3, 1, 5), models, strict=True):
        model.register_buffer("count", torch.tensor([count, 7]))
        model.layers[1].register_buffer("ids", torch.arange(4))  # type: ignore[index, union-attr]
    return suite


SUITES: dict[str, Callable[[], Suite]] = {
    "t5, untied": lambda: t5_suite(depths=(1, 1), tasks=2, untied=True),
    "integers": counting_suite,
}


@pytest.mark.parametrize("name", SUITES)
def test_merging_by_tensor_has_fusion_benchs_bits(name: str):
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


def merged_by(config: Any, pool: Any) -> nn.Module:
    return Upstream(config, PoolModels(pool)).merged_model(None)


@pytest.mark.parametrize(
    ("config", "make"), [(ARITHMETIC, lambda _: suite_pool()), (AVERAGE, t5_pool)]
)
def test_files_are_merged_as_they_load(make: Any, config: Any, tmp_path: Path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    merged = merged_by(config, make(tmp_path))
    assert "tensor by tensor from files" in caplog.text
    caplog.clear()
    monkeypatch.setattr(upstream, "merged_from_files", lambda *_: None)
    expected = merged_by(config, make(tmp_path))
    assert "tensor by tensor" not in caplog.text
    assert_identical(merged, expected)
    assert type(merged) is type(expected)


# --- read budgets ---


def file_bytes(pool: Any, *names: str) -> int:
    sources = [PoolModel(pool, name).files for name in names]
    return sum(map(total_bytes, filter(None, sources)))


def reads_of(pool: Any, base_method: Any, **options: Any) -> dict[str, Any]:
    """The manifest of a run's calibration."""
    few: dict[str, Any] = {"samples_per_task": 2, "presets": {}, "mix_alpha": 0.0}
    method: Any = FeatCalAlgorithm(base_method=base_method, **few, **options)
    results, calibrate = [], method._calibrate
    method._calibrate = lambda *args: results.append(calibrate(*args)) or results[-1]
    method.run(pool)
    ((result, cost),) = results
    reads = result.reads
    read = reads["upstream"]["experts"] + sum(reads["experts"].values())
    assert cost.more["expert_bytes"] == read
    return reads


@pytest.mark.parametrize(("base_method", "budget"), [(AVERAGE, "1MB"), (TIES, "100%")])
def test_a_budget_that_merging_exceeds_is_refused_before_anything_is_loaded(
    base_method: Any, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = suite_pool()
    monkeypatch.setattr(type(pool), "load_model", lambda *_: pytest.fail("a model was loaded"))
    message = (
        rf"method\.expert_read_budget={budget} cannot be kept: \w+ reads every expert whole "
        rf"\({file_bytes(pool, *EXPERTS)} bytes\).*Give more bytes than that"
    )
    with pytest.raises(CalibrationError, match=message):
        FeatCalAlgorithm(base_method=base_method, expert_read_budget=budget).run(pool)


def test_merger_and_calibration_keep_a_budget_together() -> None:
    pool = suite_pool()
    whole = file_bytes(pool, *EXPERTS)
    reads = reads_of(pool, ARITHMETIC, expert_read_budget=whole + whole // 3)
    assert reads["upstream"]["experts"] == whole and reads["upstream"]["base"] > 0
    assert reads["plan"]["limit"] == whole // 3 >= sum(reads["experts"].values()) > 0
    assert reads["plan"]["not_read"] and reads["budget"] == whole + whole // 3
