"""`method=compare` on pools of language models."""

from itertools import chain
from pathlib import Path

import pytest
from comparison_parts import FakeProgram
from configs import composed
from hydra.utils import instantiate
from tiny_texts import MAKERS, TASKS, sentences, text_pool, text_tokenizer

from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.tasks import TextTaskPool

SUITES = {"seq2seq": "flan-t5-mini_TA6", "causal": "llama-mini_TA6"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(MAKERS))
def test_the_default_grid_of_language_pools_has_no_failing_cell(kind: str, tmp_path: Path) -> None:
    few = ["samples_per_task=10", "steps=2", "upstream_mergers.wudi.iter_num=2"]
    # One merger more would run the same cells again.
    few += [f"results_dir={tmp_path}/cells", "upstreams=[task_arithmetic,wudi]"]
    words = ["method=compare", f"modelpool={SUITES[kind]}", *(f"method.{word}" for word in few)]
    config = composed(*words)
    algorithm = instantiate(config.method, _recursive_=False)
    tests = {task: sentences(task, 6) for task in TASKS}
    taskpool = TextTaskPool(tests, tokenizer=text_tokenizer(kind), max_new_tokens=3)
    algorithm._program = FakeProgram(taskpool)
    algorithm._program._modelpool = {"featcal": config.modelpool.featcal}
    algorithm.run(text_pool(kind, tmp_path / "models"))
    run = read_run(tmp_path / "cells" / "table")
    assert not any(note.kind == "failed" for note in run.notes)
    over_wudi = {row.name: row for row in run.rows if row.merger == "wudi"}
    expected = {"ridge_surgery", "featcal", "featcal_paper_flan_t5"}
    for name in ("surgery", "prob_surgery"):
        expected |= {name, f"{name}_calibration"}
    assert expected <= set(over_wudi) and "surgery_v2" not in over_wudi
    cost = over_wudi["ridge_surgery"].cost
    assert (cost["modules_added"], cost["task_id_at_inference"]) == (len(TASKS), 1)
    mergers = {row.merger for row in run.rows}
    assert {"regmean", "regmean_plusplus", "lot"} <= mergers and "adamerging" not in mergers


@pytest.mark.parametrize("pool", ["llama-mini_TA6", "open-clip-vit-mini_TA6"])
def test_pools_leave_out_entries_that_exist(pool: str) -> None:
    """A misspelt name would leave nothing out, and nobody would know."""
    config = composed("method=compare", f"modelpool={pool}")
    method, left_out = config.method, {*config.modelpool.featcal.compare.leave_out}
    entries = method.upstream_mergers, method.mergers_alone, method.post_merging_methods
    assert {"adamerging", "surgery_v2"} <= left_out <= {*chain(*entries)}
