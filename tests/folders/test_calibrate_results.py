"""`featcal calibrate` with `--as-lora`, `--evaluate` and `--strict`, and what they leave."""

import json
from typing import Any

import pytest
import torch
from made_folders import classifier_folders, llama_folders
from peft import PeftModel
from test_calibrate_command import report_of, words
from tiny_texts import TASKS
from transformers import AutoModelForCausalLM, AutoTokenizer

from fusion_bench_featcal.cli import main

PAPER = ("--preset", "paper")
SCORE = """
def rows(model, tokenizer):
    return {"layers": model.config.num_hidden_layers, "tokens": len(tokenizer("a b")["input_ids"])}
"""


def test_an_adapter_beside_the_model(tmp_path, capsys):
    models = llama_folders(tmp_path)
    assert main(words(tmp_path, *PAPER, "--as-lora", "64")) == 0
    assert "adapter of rank 64: 0.0 % of the change's energy is lost" in capsys.readouterr().out
    report = report_of(tmp_path)
    assert list(report.rows) == ["experts", "merged", "featcal", "featcal:lora 64"]
    assert report.loss["featcal:lora 64"] == pytest.approx(report.loss["featcal"], rel=1e-4)
    folder = tmp_path / "out" / "adapter"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    loaded: Any = PeftModel.from_pretrained(base, str(folder))
    for name, value in loaded.merge_and_unload().state_dict().items():
        torch.testing.assert_close(value, whole[name].float(), rtol=1e-4, atol=1e-5)
    saved = json.loads((folder / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "base") and models


def test_an_adapter_of_a_low_rank_is_evaluated_with_what_it_loses(tmp_path):
    classifier_folders(tmp_path)
    assert main(words(tmp_path, *PAPER, "--as-lora", "1")) == 0
    report = report_of(tmp_path)
    assert report.loss["featcal:lora 1"] != report.loss["featcal"]
    assert any(note.text.startswith("adapter of rank 1: ") for note in report.notes)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--as-lora", "0"), "as_lora must be null or an integer >= 1"),
        (("--strict", "--no-eval", *PAPER), "--set held_out=auto"),
        (("--evaluate", "no_such_module:score"), "No module named 'no_such_module'"),
        (("--evaluate", "lm-eval:arc_easy"), "pip install 'fusion_bench_featcal[llm]'"),
        (("--evaluate", "layer_scores:rows", "--no-eval"), "--no-eval skips --evaluate"),
        (("--evaluate", "a:b", "--evaluate", "a:c"), "--evaluate: a is named twice"),
    ],
)
def test_refused_before_anything_is_loaded(tmp_path, capsys, more, message):
    llama_folders(tmp_path)
    assert main(words(tmp_path, *more)) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_an_adapter_needs_a_base_of_the_same_sizes(tmp_path, capsys):
    llama_folders(tmp_path)
    named = words(tmp_path, "--as-lora", "2", "--set", "anchor_rho=1", *PAPER)
    at = named.index("--base")
    assert main(named[:at] + named[at + 2 :]) == 2
    assert "--as-lora needs --base" in capsys.readouterr().err


def test_own_scores_before_and_after(tmp_path, monkeypatch, capsys):
    llama_folders(tmp_path)
    (tmp_path / "layer_scores.py").write_text(SCORE)
    monkeypatch.chdir(tmp_path)
    assert main(words(tmp_path, *PAPER, "--evaluate", "layer_scores:rows")) == 0
    line = "evaluated by layer_scores:rows tokens: merged 2, featcal 2"
    assert line in capsys.readouterr().out and line in [
        note.text for note in report_of(tmp_path).notes
    ]


def test_strict_saves_nothing_where_a_task_is_behind(tmp_path, capsys):
    llama_folders(tmp_path)
    run = words(tmp_path, "--set", "samples_per_task=24", "--set", "held_out=8")
    assert main(run) == 0
    shown = capsys.readouterr().out
    verdict = next(line for line in shown.splitlines() if line.startswith("verdict: no closer"))
    assert "Try more samples (--set samples_per_task), " in verdict
    assert report_of(tmp_path).notes[-1].text == verdict
    (tmp_path / "out").rename(tmp_path / "first")
    assert main([*run, "--strict"]) == 1
    ended = capsys.readouterr()
    assert verdict in ended.out and "--strict: nothing was saved" in ended.err
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.blocks").exists()


def test_strict_saves_where_all_tasks_are_closer(tmp_path, capsys):
    llama_folders(tmp_path)
    assert main(words(tmp_path, *PAPER, "--set", "ridge_lambda=1e12", "--strict")) == 0
    shown = capsys.readouterr().out
    assert "verdict: 2 of 2 tasks are closer to the experts than the merged model is" in shown
    assert all(shown.count(f"gain of {task} on ") == 1 for task in TASKS)


def test_files_of_the_tokenizer_stay_as_they_are(tmp_path):
    llama_folders(tmp_path)
    file = tmp_path / "merged" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"padding_side": "left"}))  # calibration pads on the right
    assert main(words(tmp_path, *PAPER, "--no-eval")) == 0
    assert (tmp_path / "out" / file.name).read_text() == file.read_text()
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] }}")
    more = ("--chat-template", str(tmp_path / "chat.jinja"), "--no-eval")
    (tmp_path / "out").rename(tmp_path / "first")
    assert main(words(tmp_path, *PAPER, *more)) == 0
    template = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert template == "{{ messages[0]['content'] }}"
