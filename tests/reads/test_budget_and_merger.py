"""A read budget counts what the upstream merger reads, and is refused where that exceeds it."""

from pathlib import Path
from typing import Any

import pytest
from image_pools import ARITHMETIC, AVERAGE, suite_pool
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.experts import known_bytes
from fusion_bench_featcal.fusionbench.plan_run import run_request
from fusion_bench_featcal.fusionbench.pool_models import PoolModel
from fusion_bench_featcal.suites import image

TIES = {
    "_target_": "fusion_bench.method.TiesMergingAlgorithm",
    "scaling_factor": 0.3,
    "threshold": 20,
    "remove_keys": [],
    "merge_func": "sum",
}
EXPERTS = ("mini_greek", "mini_latin")


def file_bytes(pool: Any, name: str) -> int:
    source = PoolModel(pool, name).files
    assert source is not None
    return sum(known_bytes(source, key) for key in source.names())


def all_experts(pool: Any) -> int:
    return sum(file_bytes(pool, name) for name in EXPERTS)


def reads_of(pool: Any, base_method: Any, **options: Any) -> dict[str, Any]:
    """The manifest of the run's own calibration."""
    method = FeatCalAlgorithm(
        base_method=base_method, samples_per_task=2, presets={}, mix_alpha=0.0, log_drift=False,
        **options,
    )  # fmt: skip
    found: list[Any] = []
    calibrate = method._calibrate

    def noted(*arguments: Any) -> Any:
        found.append(calibrate(*arguments))
        return found[-1]

    method._calibrate = noted  # type: ignore[method-assign]
    method.run(pool)
    ((result, cost),) = found
    totals = result.reads["totals"]
    assert cost.more["expert_bytes"] == totals["all_experts_read"]
    return result.reads


@pytest.mark.parametrize(
    ("base_method", "budget"), [(AVERAGE, "1MB"), (ARITHMETIC, "100%"), (TIES, "100%")]
)
def test_budget_that_merging_exceeds_is_refused_before_anything_is_loaded(
    base_method: Any, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = suite_pool()
    monkeypatch.setattr(type(pool), "load_model", lambda *_: pytest.fail("a model was loaded"))
    message = (
        rf"method\.expert_read_budget={budget} cannot be kept: \w+ reads every expert whole "
        rf"\({all_experts(pool)} bytes\).*method\.base_method=null"
    )
    with pytest.raises(CalibrationError, match=message):
        FeatCalAlgorithm(base_method=base_method, expert_read_budget=budget).run(pool)


@pytest.mark.parametrize("base_method", [ARITHMETIC, TIES])
def test_merger_and_calibration_keep_a_budget_together(base_method: Any) -> None:
    pool = suite_pool()
    whole = all_experts(pool)
    reads = reads_of(pool, base_method, expert_read_budget=whole + whole // 3)
    totals = reads["totals"]
    assert totals["upstream_experts_read"] == whole
    assert reads["plan"]["limit"] == whole // 3
    assert 0 < totals["experts_read"] <= whole // 3
    assert totals["all_experts_read"] == whole + totals["experts_read"]
    assert totals["merged_stood_in"] > 0
    assert reads["budget"] == whole + whole // 3


def test_merged_model_of_the_pool_is_no_expert_read(tmp_path: Path) -> None:
    CLIPVisionModel.from_pretrained(image.path()).save_pretrained(tmp_path)
    models = {"_pretrained_": image.path(), "_merged_": str(tmp_path)}
    pool = suite_pool(models=models | {name: image.path(name) for name in EXPERTS})
    totals = reads_of(pool, None, expert_read_budget="50%")["totals"]
    assert totals["merged_read"] == file_bytes(pool, "_merged_")
    assert totals["upstream_experts_read"] == 0
    assert 0 < totals["all_experts_read"] <= all_experts(pool) // 2


def test_plan_takes_off_what_a_merger_reads() -> None:
    words = ["modelpool=clip-vit-mini_TA6"]
    left = run_request([*words, "method.expert_read_budget=1GB"]).settings.expert_read_budget
    assert isinstance(left, int) and left < 10**9
    with pytest.raises(CalibrationError, match="reads every expert whole"):
        run_request([*words, "method.expert_read_budget='50%'"])
