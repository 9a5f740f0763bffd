"""`method=compare` on pools of language models: everything that the default grid has for them."""

import json
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import FakeProgram
from configs import composed
from hydra.utils import instantiate
from omegaconf import OmegaConf
from text_pools import MAKERS, text_pool, text_tokenizer
from tiny_texts import TASKS, sentences

from fusion_bench_featcal.lab.compare import inference
from fusion_bench_featcal.lab.compare.inference import InferenceTimer, Timed
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.cost import TASK_ID
from fusion_bench_featcal.tasks import TextTaskPool

SUITES = {"seq2seq": "flan-t5-mini_TA6", "causal": "llama-mini_TA6"}
TEXT_POOLS = (*SUITES.values(), "flan-t5-base_glue", "mergebench_llama-3.2-3b-instruct")


def compared(pool: str, *overrides: str) -> Any:
    return composed("method=compare", f"modelpool={pool}", *overrides)


def task_pool(kind: str) -> TextTaskPool:
    tests = {task: sentences(task, 6) for task in TASKS}
    return TextTaskPool(tests, tokenizer=text_tokenizer(kind), max_new_tokens=3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MAKERS))
def test_default_grid_of_language_pools_has_no_failing_cell(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "REPEATS", 1)
    few = ["samples_per_task=10", "steps=2", "upstream_mergers.wudi.iter_num=2"]
    # One merger more would run the same cells again.
    few += [f"results_dir={tmp_path}/cells", "upstreams=[task_arithmetic,wudi]"]
    config = compared(SUITES[kind], *(f"method.{word}" for word in few))
    algorithm = instantiate(config.method, _recursive_=False)
    program: Any = FakeProgram(task_pool(kind))
    program._modelpool = {"featcal": config.modelpool.featcal}
    algorithm._program = program
    pool = text_pool(kind, tmp_path / "models")
    algorithm.run(pool)
    results = tmp_path / "cells"
    content = json.loads((results / "report.json").read_text())
    assert content["failed"] == []
    report = Report.load(results / "wudi")
    assert {"surgery", "surgery:calibration", "prob_surgery", "prob_surgery:calibration"} <= set(
        report.rows
    )
    assert {"ridge_surgery", "featcal", "featcal:paper_flan_t5", "anchor_only"} <= set(report.rows)
    assert "surgery_v2" not in report.rows
    assert report.cost["ridge_surgery"]["modules_added"] == len(TASKS)
    assert report.cost["ridge_surgery"][TASK_ID] == "yes"
    assert isinstance(report.cost["featcal"]["inference_seconds_per_sample"], float)
    for alone in ("regmean", "regmean_plusplus", "lot"):
        assert alone in Report.load(results / alone).rows
    assert not (results / "adamerging").exists()


@pytest.mark.parametrize("pool", [*TEXT_POOLS, "open-clip-vit-mini_TA6"])
def test_pools_leave_out_what_there_is(pool: str) -> None:
    """A misspelt name would leave nothing out, and nobody would know."""
    config = compared(pool)
    changes = OmegaConf.to_container(config.modelpool.featcal.compare)
    assert isinstance(changes, dict)
    method = config.method
    known = {*method.upstream_mergers, *method.mergers_alone, *method.post_merging_methods}
    assert set(changes["leave_out"]) <= known
    assert {"adamerging", "surgery_v2"} <= set(changes["leave_out"])
    if pool in TEXT_POOLS:
        wudi = "lm_head.weight" in changes["upstream_mergers"]["wudi"]["exclude_keys"]
        assert wudi and "wudi" in method.upstream_mergers


def test_time_of_a_language_model_is_that_of_answers_of_one_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inference, "REPEATS", 1)
    model: Any = MAKERS["causal"](0).float()
    lengths = []
    generate = model.generate

    def counted(**options: Any) -> Any:
        written = generate(**options)
        lengths.append(written.shape[1] - options["input_ids"].shape[1])
        return written

    model.generate = counted
    pool = task_pool("causal")
    pool.setup()
    fabric = pool.fabric
    assert isinstance(InferenceTimer(pool, fabric, lambda: model).time(model), Timed)
    assert lengths == [inference.ANSWER] * 4  # model and reference, twice each
