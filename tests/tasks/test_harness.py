"""The LM Evaluation Harness as a task pool, with a harness of a few lines in its place."""

import importlib.machinery
import sys
import types
from typing import Any

import pytest
from tiny_texts import llama_model, word_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.fusionbench.evaluation import evaluate
from fusion_bench_featcal.tasks.harness import LMEvalTaskPool

RESULTS = {"gsm8k": {"exact_match,none": 0.25, "alias": "gsm8k"}, "ifeval": {"acc,none": 0.5}}


@pytest.fixture
def harness(monkeypatch):
    """What was asked of lm-eval."""
    asked: dict[str, Any] = {}
    parts = {name: types.ModuleType(name) for name in (
        "lm_eval", "lm_eval.models", "lm_eval.models.huggingface", "lm_eval.tasks")}  # fmt: skip
    for name, part in parts.items():
        part.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, part)
    whole: Any = parts["lm_eval"]
    wrapper: Any = parts["lm_eval.models.huggingface"]
    listed: Any = parts["lm_eval.tasks"]
    listed.TaskManager = lambda **options: types.SimpleNamespace(all_tasks=list(RESULTS), **options)
    wrapper.HFLM = lambda **options: asked.update(wrapped=options)
    whole.simple_evaluate = lambda **options: asked.update(options) or {"results": RESULTS}
    return asked


def test_each_task_has_its_own_metric(harness, tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    tasks = {"gsm8k": "exact_match,none", "ifeval": "acc,none"}
    pool = LMEvalTaskPool(tasks, tokenizer=str(tmp_path), batch_size=3, limit=7)
    model = llama_model()
    found = evaluate(pool, model, name="merged")
    assert found.accuracy == {"gsm8k": 0.25, "ifeval": 0.5}
    assert (harness["tasks"], harness["limit"]) == (["gsm8k", "ifeval"], 7)
    assert harness["confirm_run_unsafe_code"] is False
    assert harness["wrapped"]["pretrained"] is model
    assert harness["wrapped"]["batch_size"] == 3


def test_a_metric_that_is_not_there_is_named(harness, tmp_path):
    word_tokenizer().save_pretrained(tmp_path)
    pool = LMEvalTaskPool({"gsm8k": "acc,none"}, tokenizer=str(tmp_path))
    with pytest.raises(CalibrationError, match=r"taskpool\.tasks\.gsm8k.*exact_match,none"):
        pool.evaluate(llama_model())


def test_unknown_keys_and_no_tasks_are_refused(harness):
    with pytest.raises(ValueError, match=r"taskpool.*limits"):
        LMEvalTaskPool({"gsm8k": "x"}, tokenizer="x", limits=1)
    with pytest.raises(ValueError, match=r"include_path 'nowhere' is no folder"):
        LMEvalTaskPool({"gsm8k": "x"}, tokenizer="x", include_path="nowhere")
    with pytest.raises(ValueError, match="no tasks"):
        LMEvalTaskPool({}, tokenizer="x")


def test_without_lm_eval_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(CalibrationError, match=r"\[llm\].*default_taskpool=null"):
        LMEvalTaskPool({"gsm8k": "x"}, tokenizer="x")
