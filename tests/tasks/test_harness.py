"""The LM Evaluation Harness as a task pool, with a harness of a few lines in its place."""

import importlib.machinery
import sys
import types
from typing import Any

import pytest
from tiny_texts import llama_model, word_tokenizer

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.tasks import LMEvalTaskPool

RESULTS = {"gsm8k": {"exact_match,none": 0.25, "alias": "gsm8k"}, "ifeval": {"acc,none": 0.5}}


def test_each_task_has_its_own_metric(monkeypatch, tmp_path):
    arguments: dict[str, Any] = {}

    def module(name: str, **contents: Any) -> None:
        module = types.ModuleType(name)
        vars(module).update(contents, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)

    evaluation = lambda **options: arguments.update(options) or {"results": RESULTS}  # noqa: E731
    loaded: list[list[str]] = []
    index = lambda **_: types.SimpleNamespace(all_tasks=list(RESULTS), load=loaded.append)  # noqa: E731
    module("lm_eval", simple_evaluate=evaluation)
    module("lm_eval.models")
    module("lm_eval.models.huggingface", HFLM=lambda **options: arguments.update(wrapped=options))
    module("lm_eval.tasks", TaskManager=index)
    word_tokenizer().save_pretrained(tmp_path)
    tasks, model = {"gsm8k": "exact_match,none", "ifeval": "acc,none"}, llama_model()
    pool = LMEvalTaskPool(tasks, tokenizer=str(tmp_path), batch_size=3, limit=7)
    _ = pool.opened
    assert loaded == [[task] for task in tasks] and not arguments
    report = pool.evaluate(model)
    assert [report[task]["accuracy"] for task in tasks] == [0.25, 0.5]
    assert (arguments["tasks"], arguments["limit"]) == (["gsm8k", "ifeval"], 7)
    assert arguments["confirm_run_unsafe_code"] is False
    assert arguments["wrapped"]["pretrained"] is model
    tasks["ifeval"] = "exact_match,none"
    with pytest.raises(CalibrationError, match=r"taskpool\.tasks\.ifeval.*acc,none"):
        pool.evaluate(model)
    unknown = LMEvalTaskPool({"gsm8": "acc,none"}, tokenizer=str(tmp_path))
    with pytest.raises(CalibrationError, match=r"tasks\.gsm8: lm-eval .* \(nearest: 'gsm8k'\)"):
        _ = unknown.opened


def test_without_lm_eval_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(CalibrationError, match=r"\[llm\].*default_taskpool=null"):
        LMEvalTaskPool({"gsm8k": "x"}, tokenizer="x")
