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
    """Arguments of lm-eval's calls, filled in later."""
    arguments: dict[str, Any] = {}

    def module(name: str, **contents: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(contents, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)

    evaluation = lambda **options: arguments.update(options) or {"results": RESULTS}  # noqa: E731
    index = lambda **options: types.SimpleNamespace(all_tasks=list(RESULTS))  # noqa: E731
    module("lm_eval", simple_evaluate=evaluation)
    module("lm_eval.models")
    module("lm_eval.models.huggingface", HFLM=lambda **options: arguments.update(wrapped=options))
    module("lm_eval.tasks", TaskManager=index)
    return arguments


def pool_of(folder: Any, tasks: dict[str, str]) -> LMEvalTaskPool:
    word_tokenizer().save_pretrained(folder)
    return LMEvalTaskPool(tasks, tokenizer=str(folder), batch_size=3, limit=7)


def test_each_task_has_its_own_metric(harness, tmp_path):
    pool = pool_of(tmp_path, {"gsm8k": "exact_match,none", "ifeval": "acc,none"})
    model = llama_model()
    result = evaluate(pool, model, name="merged")
    assert result.accuracy == {"gsm8k": 0.25, "ifeval": 0.5}
    assert (harness["tasks"], harness["limit"]) == (["gsm8k", "ifeval"], 7)
    assert harness["confirm_run_unsafe_code"] is False
    assert harness["wrapped"]["pretrained"] is model
    assert harness["wrapped"]["batch_size"] == 3


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("gsm8k", r"taskpool\.tasks\.gsm8k.*exact_match,none"),
        ("gsm8", r"gsm8: lm-eval has no such task \(nearest: 'gsm8k'\)"),
    ],
)
def test_unknown_tasks_and_metrics_are_refused(harness, tmp_path, task, message):
    with pytest.raises(CalibrationError, match=message):
        pool_of(tmp_path, {task: "acc,none"}).evaluate(llama_model())


def test_without_lm_eval_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(CalibrationError, match=r"\[llm\].*default_taskpool=null"):
        pool_of(tmp_path, {"gsm8k": "x"})
