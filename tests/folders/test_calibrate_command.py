"""`featcal calibrate` on folders: what it leaves is the calibration that Python gives."""

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import (
    CHAT,
    ROWS,
    classifier_folders,
    clip_folders,
    image_classifier_folders,
    llama_folders,
    t5_folders,
    write_adapters,
    write_rows,
)
from safetensors.torch import load_file
from tiny_images import picture
from tiny_texts import TASKS, sentences, word_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionModel,
    ViTForImageClassification,
)

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.text_samples import TextEncoder, pad_samples
from fusion_bench_featcal.folders.model_folder import ModelFolder
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.suites.image import load_processor

# the experts are noise, and mostly no better than guessing
FEW = ("--set", "samples_per_task=12", "--set", "batch_size=4", "--force")


def words(folder: Path, *more: str, merged: str | None = "merged", ending: str = ".jsonl") -> Any:
    """The command's words for models and data of a folder."""
    named = [] if merged is None else [str(folder / merged)]
    named += ["--base", str(folder / "base"), "--out", str(folder / "out"), *FEW]
    for task in TASKS:
        named += ["--expert", f"{task}={folder / task}", "--data"]
        named.append(f"{task}={folder / (task + ending)}")
    return ["calibrate", *named, *more]


def report_of(folder: Path) -> Report:
    return Report.load(folder / "out" / "featcal")


def parameters(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in model.named_parameters()}


def moved(calibrated: Any, merged: Any) -> set[str]:
    """Names of parameters that differ."""
    others = parameters(merged)
    return {n for n, v in parameters(calibrated).items() if not torch.equal(v, others[n])}


@pytest.mark.parametrize("merged", ["merged", None], ids=["merged", "merged on read"])
def test_a_model_that_does_not_fit_is_evaluated_from_its_files(tmp_path, monkeypatch, merged):
    llama_folders(tmp_path)
    how = [] if merged else ["--merge", "task_arithmetic:0.4"]
    named = words(tmp_path, "--shard-size", "2KB", *how, merged=merged)
    assert main(named) == 0
    report = report_of(tmp_path)
    shutil.move(tmp_path / "out", tmp_path / "other")
    wanted = SafetensorsExpert(tmp_path / "other")
    monkeypatch.setattr(ModelFolder, "fits", lambda self, device: False)
    monkeypatch.setattr(ModelFolder, "load", None)  # no model is in memory
    assert main(named) == 0
    found = SafetensorsExpert(tmp_path / "out")
    assert found.names() == wanted.names()
    assert all(torch.equal(found.tensor(name), wanted.tensor(name)) for name in wanted.names())
    assert (report_of(tmp_path).rows, report_of(tmp_path).loss) == (report.rows, report.loss)


def test_a_language_model_as_calibrated_in_python(tmp_path, capsys):
    models = llama_folders(tmp_path)
    assert main(words(tmp_path, "--preset", "paper")) == 0
    settings = FeatCalSettings(samples_per_task=12, batch_size=4, max_length=1024)
    encoder = TextEncoder(word_tokenizer(padding_side="right"), "causal", 1024)
    batches = {}
    for task in TASKS:
        order = sample_order(ROWS, task, 42)[:12]
        samples = [encoder.sample(sentences(task, ROWS)[index], "") for index in order]
        batches[task] = [pad_samples(samples[start : start + 4], encoder) for start in (0, 4, 8)]
    experts = {task: models[task] for task in TASKS}
    expected = calibrate(models["merged"], models["base"], experts, batches, settings).model
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in parameters(saved).items():
        torch.testing.assert_close(value, expected.get_parameter(name), rtol=1e-5, atol=1e-6)
    assert moved(saved, models["merged"]) == moved(expected, models["merged"]) != set()
    report = report_of(tmp_path)
    assert list(report.rows) == ["experts", "merged", "featcal"]
    assert set(report.loss["featcal"]) == {*TASKS, "average"}
    assert report.test_sets[TASKS[0]]["items"] == ROWS // 5
    shown = capsys.readouterr().out
    assert "plan: " in shown and "loss" in shown and "; evaluated on 6 rows" in shown
    screen = " ".join(shown.split())  # the last notes are wrapped
    assert report.notes and [screen.count(n.text) for n in report.notes] == [1] * len(report.notes)
    assert not (tmp_path / "out.blocks").exists()


def test_held_back_rows_take_no_part(tmp_path, capsys):
    llama_folders(tmp_path)
    for task in TASKS:  # all of the rows that are not held back are asked for
        rows = sentences(task, ROWS)
        for index in sample_order(ROWS, task, 42)[ROWS - ROWS // 5 :]:
            rows[index] = {"prompt": "a b", "target": "t s r q"}
        write_rows(tmp_path / f"{task}.jsonl", rows)
    assert main(words(tmp_path, "--set", "samples_per_task=30", "--preset", "paper")) == 0
    assert report_of(tmp_path).samples["featcal"]["one"]["samples"] == ROWS - ROWS // 5
    first = load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out").rename(tmp_path / "first")
    for task in TASKS:
        rows = sentences(task, ROWS)
        for index in sample_order(ROWS, task, 42)[ROWS - ROWS // 5 :]:
            rows[index] = {"prompt": "c", "target": "d"}
        write_rows(tmp_path / f"{task}.jsonl", rows)
    assert main(words(tmp_path, "--set", "samples_per_task=30", "--preset", "paper")) == 0
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_merges_on_the_way(tmp_path):
    models = llama_folders(tmp_path)
    by_folder = words(tmp_path, "--preset", "paper")
    assert main(by_folder) == 0
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    on_the_way = words(tmp_path, "--preset", "paper", merged=None)
    assert main([*on_the_way, "--merge", "task_arithmetic:0.4"]) == 0
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in parameters(second).items():
        torch.testing.assert_close(value, first.get_parameter(name), rtol=1e-4, atol=1e-5)
    assert moved(second, models["merged"])
    assert report_of(tmp_path).upstream == "task_arithmetic"


def test_lora_adapters_are_experts(tmp_path, capsys):
    models = llama_folders(tmp_path)
    write_adapters(tmp_path, models["base"])
    named = words(tmp_path, merged=None, ending=".jsonl")
    named = [w if not w.endswith(tuple(f"/{t}" for t in TASKS)) else f"{w}-lora" for w in named]
    assert main([*named, "--merge", "simple_average"]) == 0
    shown = capsys.readouterr().out
    assert f"  merge: simple_average\n  base: {tmp_path / 'base'}\n  experts: " in shown
    assert shown.count("-lora (LoRA adapter)") == len(TASKS)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    changed = moved(saved, models["base"])
    assert any(name.endswith("q_proj.weight") for name in changed)
    assert not any("embed" in name for name in changed)


def test_an_encoder_decoder(tmp_path):
    models = t5_folders(tmp_path)
    assert main(words(tmp_path)) == 0
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    changed = moved(saved, models["merged"])
    assert any(name.startswith("decoder") for name in changed) and "shared.weight" not in changed


def test_experts_write_missing_targets(tmp_path, capsys):
    llama_folders(tmp_path)
    prompts = [{"prompt": row["prompt"]} for row in sentences("one", ROWS)]
    write_rows(tmp_path / "one.jsonl", prompts)
    assert main(words(tmp_path, "--set", "generated_tokens=3", "--preset", "paper")) == 0
    shown = capsys.readouterr().out
    assert "one: no targets in --data, so its expert writes them" in shown
    assert "two: no targets" not in shown
    assert report_of(tmp_path).rows["experts"]["one"] == 1  # of answers that it has written itself


def test_plain_texts_and_chats(tmp_path, capsys):
    llama_folders(tmp_path)
    texts = [{"text": f"{row['prompt']} {row['target']}"} for row in sentences("one", ROWS)]
    write_rows(tmp_path / "one.jsonl", texts)
    chats = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["target"]},
            ]
        }
        for row in sentences("two", ROWS)
    ]
    write_rows(tmp_path / "two.jsonl", chats)
    assert main(words(tmp_path)) == 2
    assert "--chat-template" in capsys.readouterr().err
    (tmp_path / "chat.jinja").write_text(CHAT)
    assert main(words(tmp_path, "--chat-template", str(tmp_path / "chat.jinja"))) == 0
    assert "share of tokens that are right" in capsys.readouterr().out


def test_text_classifiers_keep_their_heads(tmp_path):
    models = classifier_folders(tmp_path)
    assert main(words(tmp_path)) == 0
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    changed = moved(saved, models["merged"])
    assert changed and all(name.startswith("bert.encoder.") for name in changed)
    head = load_file(tmp_path / "out" / "heads" / "two" / "head.safetensors")
    expert = models["two"].state_dict()
    assert set(head) == {"classifier.weight", "classifier.bias"}
    assert all(torch.equal(value, expert[name]) for name, value in head.items())
    assert report_of(tmp_path).test_sets["two"]["items"] == ROWS // 5


LETTERS = [letter for pair in zip("abcdef", "ABCDEF", strict=True) for letter in pair]


@pytest.mark.parametrize("names", [[str(n) for n in range(12)], LETTERS])
def test_labels_by_name_are_those_by_number(tmp_path, names):
    models = classifier_folders(tmp_path)
    config = models["one"].config.to_dict()
    head = names if names == LETTERS else [f"LABEL_{n}" for n in range(12)]
    config |= {"id2label": dict(enumerate(head)), "label2id": {n: i for i, n in enumerate(head)}}
    expert = BertForSequenceClassification(BertConfig(**config))
    expert.bert.load_state_dict(models["one"].bert.state_dict())
    expert.save_pretrained(tmp_path / "one")
    losses = []
    for labels in (range(12), names):
        texts = [row["prompt"] for row in sentences("one")]
        rows = [{"text": t, "label": label} for t, label in zip(texts, labels, strict=True)]
        write_rows(tmp_path / "test.jsonl", rows)
        data = ["--eval", f"one={tmp_path / 'test.jsonl'}", "--preset", "paper"]
        assert main(words(tmp_path, *data, "--set", "samples_per_task=2")) == 0
        losses.append(report_of(tmp_path).loss["experts"]["one"])
        (tmp_path / "out").rename(tmp_path / f"out{len(losses)}")
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", [BertForMaskedLM, BertModel])
def test_a_base_with_another_head_than_its_classifiers(tmp_path, kind, capsys):
    models = classifier_folders(tmp_path)
    body = models["base"].bert.state_dict()
    base = kind(models["base"].config)
    target = base if kind is BertModel else base.bert
    target.load_state_dict({n: body[n] for n in target.state_dict()})
    base.save_pretrained(tmp_path / "base")
    assert main(words(tmp_path, "--merge", "task_arithmetic:0.4", merged=None)) == 0
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    before = "bert.embeddings.word_embeddings.weight"  # merged, and not calibrated
    expected = models["merged"].get_parameter(before)
    torch.testing.assert_close(saved.get_parameter(before), expected, rtol=1e-4, atol=1e-5)
    assert "heads: " in capsys.readouterr().out
    assert "## Heads" in (tmp_path / "out" / "README.md").read_text()


def test_image_classifiers(tmp_path):
    models = image_classifier_folders(tmp_path)
    assert main(words(tmp_path, ending="-images")) == 0
    saved = ViTForImageClassification.from_pretrained(tmp_path / "out")
    assert moved(saved, models["merged"])
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()
    with open(tmp_path / "out" / "featcal" / "lines.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["metric"] == "loss"]
    for task in TASKS:  # heads are the same, bodies are not
        losses = [line["value"] for line in lines if line["task"] == task]
        assert len(losses) == len(set(losses)) == 3


def test_a_whole_clip_keeps_its_text_tower(tmp_path):
    models = clip_folders(tmp_path)
    assert main(words(tmp_path, ending="-images")) == 0
    saved = CLIPModel.from_pretrained(tmp_path / "out")
    changed = moved(saved, models["merged"])
    assert changed and all(name.startswith("vision_model.encoder.") for name in changed)
    assert list(report_of(tmp_path).rows) == ["experts", "merged", "featcal"]
    processor: Any = CLIPProcessor.from_pretrained(tmp_path / "out")
    assert processor(text=["a star"], images=picture(0), return_tensors="pt")["input_ids"].numel()


def test_vision_towers_alone_take_their_heads_from_a_clip(tmp_path):
    clip_folders(tmp_path)
    for name in ("base", *TASKS, "merged"):
        CLIPVisionModel.from_pretrained(tmp_path / name).save_pretrained(tmp_path / name / "tower")
        load_processor().save_pretrained(tmp_path / name / "tower")
    named = words(tmp_path, ending="-images")
    ends = tuple(f"/{name}" for name in ("base", *TASKS, "merged"))
    named = [f"{word}/tower" if word.endswith(ends) else word for word in named]
    assert main([*named, "--text-tower", str(tmp_path / "base")]) == 0
    assert list(report_of(tmp_path).rows) == ["experts", "merged", "featcal"]
    assert type(CLIPVisionModel.from_pretrained(tmp_path / "out")) is CLIPVisionModel


def test_goes_on_after_an_interruption(tmp_path, monkeypatch, capsys):
    llama_folders(tmp_path)
    from fusion_bench_featcal.output.folder import OutputFolder

    write, done = OutputFolder.write, []

    def interrupted(self, *args, **kwargs):
        if done:
            raise KeyboardInterrupt
        done.append(1)
        return write(self, *args, **kwargs)

    paper = words(tmp_path, "--preset", "paper")
    monkeypatch.setattr(OutputFolder, "write", interrupted)
    said: list[str] = []
    monkeypatch.setattr("atexit.register", lambda _, line, **__: said.append(line))
    with pytest.raises(SystemExit) as ended:
        main(paper)
    assert ended.value.code == 130
    assert "--resume" in said[0]
    assert not (tmp_path / "out").exists() and (tmp_path / "out.blocks").is_dir()
    monkeypatch.setattr(OutputFolder, "write", write)
    assert main([*paper, "--resume"]) == 0
    resumed = load_file(tmp_path / "out" / "model.safetensors")
    (tmp_path / "out").rename(tmp_path / "resumed")
    assert main(paper) == 0
    whole = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_needs_neither_fusion_bench_nor_hydra(tmp_path):
    llama_folders(tmp_path)
    code = (
        "import sys\n"
        "from fusion_bench_featcal.cli import main\n"
        f"assert main({words(tmp_path, '--preset', 'paper')!r}) == 0\n"
        "wanted = {'fusion_bench', 'hydra', 'omegaconf', 'lightning'}\n"
        "print('loaded:', *(wanted & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["loaded:"]


def test_one_task_is_one_and_its_merger_is_not_named(tmp_path, capsys):
    llama_folders(tmp_path)
    task = TASKS[0]
    row = json.loads((tmp_path / f"{task}.jsonl").read_text().splitlines()[0])
    write_rows(tmp_path / "one.jsonl", [row])
    named = ["--expert", f"{task}={tmp_path / task}", "--data", f"{task}={tmp_path / 'one.jsonl'}"]
    named += ["--base", str(tmp_path / "base"), "--out", str(tmp_path / "out"), "--preset", "paper"]
    rows = str(tmp_path / f"{task}.jsonl")
    assert main(["calibrate", str(tmp_path / "merged"), *named, "--eval", f"{task}={rows}"]) == 0
    assert main(["report", str(tmp_path / "out" / "featcal")]) == 0
    assert main(["report", str(tmp_path / "out"), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    for words in (", 1 task\n", f"{task}: 1 sample of", "merged elsewhere"):
        assert words in shown
    page = (tmp_path / "page.html").read_text()
    assert "merged elsewhere" in page
    for text in (shown, page, (tmp_path / "out" / "featcal" / "report.md").read_text()):
        assert not re.findall(
            r"(?<![\d.])1 (?:tasks|samples|threads|runs)\b|merged by merged", text
        )
