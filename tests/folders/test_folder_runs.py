"""`featcal calibrate` on folders of models: its result is the calibration that Python gives."""

import gc
import json
import logging
import re
import shlex
import shutil
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from made_folders import (
    CHAT,
    HELD_OUT,
    PAPER,
    ROWS,
    classifier_folders,
    forbid_loading,
    words,
    write_rows,
)
from reports import error_of, featcal
from safetensors.torch import load_file, save_file
from tiny_models import scatter
from tiny_texts import TASKS, llama_model, sentences, word_tokenizer
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForSequenceClassification,
    CLIPProcessor,
)
from transformers.utils import logging as hf_logging

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.folders import calibrate_folder, options, screen, transformers_models
from fusion_bench_featcal.folders.read_request import read_request
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.results import read_run


def items(run: Any, task: str) -> int:
    """Return the number of test items of a task."""
    return len((run.report.rows[-1].correct or {})[task])


def changed(calibrated: Any, merged: Any) -> set[str]:
    """Names of parameters that differ."""
    before = dict(merged.named_parameters())
    return {n for n, value in calibrated.named_parameters() if not torch.equal(value, before[n])}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    source = SafetensorsExpert(folder)
    return {name: source.tensor(name) for name in source.names()}


# --- one run of a language model, and its repetitions ---


def batches_by_hand(task: str) -> list[dict[str, torch.Tensor]]:
    """Rows that are not held out: prompt, target and end token, of which targets are labels."""
    tokenizer, samples = word_tokenizer(), list[dict[str, torch.Tensor]]()
    for index in sample_order(ROWS, task, 42)[: ROWS - HELD_OUT]:
        row = sentences(task, ROWS)[index]
        prompt, target = (tokenizer(row[name])["input_ids"] for name in ("prompt", "target"))
        ids, labels = [*prompt, *target, 1], [*[-100] * len(prompt), *target, 1]
        columns = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
        samples.append({name: torch.tensor(value) for name, value in columns.items()})
    return [
        {name: pad_sequence([sample[name] for sample in samples[n : n + 4]], batch_first=True,
                            padding_value=-100 if name == "labels" else 0) for name in samples[0]}
        for n in range(0, len(samples), 4)
    ]  # fmt: skip


def test_a_language_model_as_calibrated_in_python_without_held_out_rows(finished):
    run = finished("llama")
    settings = FeatCalSettings(samples_per_task=ROWS, batch_size=4, max_length=1024)
    batches = {task: batches_by_hand(task) for task in TASKS}
    experts = {task: run.models[task] for task in TASKS}
    merged, base = run.models["merged"], run.models["base"]
    expected = calibrate(merged, base, experts, batches, settings).model
    saved = AutoModelForCausalLM.from_pretrained(run.out)
    for name, value in saved.named_parameters():
        torch.testing.assert_close(value, expected.get_parameter(name), rtol=1e-5, atol=1e-6)
    assert changed(saved, merged) == changed(expected, merged) != set()


def test_report_and_screen(finished):
    run = finished("llama")
    assert list(run.report.accuracy) == ["experts", "merged", "featcal"]
    assert set(run.report.row("featcal").scores["loss"]) == {*TASKS}
    assert items(run, "one") == HELD_OUT
    assert run.report.row("featcal").samples["one"]["samples"] == ROWS - HELD_OUT
    reads = json.loads((run.out / "featcal" / "reads.json").read_text())
    assert {*reads["experts"]} == {*TASKS} and reads["upstream"] is reads["budget"] is None
    # The table has the changes of each task.
    notes = [note.text for note in run.report.notes if note.kind != "verdict" or not note.task]
    assert f"one.jsonl (prompt=q, target=a); evaluated on {HELD_OUT} examples held out" in notes[0]
    assert notes[1] == "one: 4 of 6 test examples are also samples, but are scored nevertheless"
    assert notes[2] == "one: columns that are not read: prompt"
    assert "saved:fit (prompt=ask, target=a); evaluated on" in notes[3]
    text = run.screen
    assert "plan: " in text and [text.count(note) for note in notes] == [1] * len(notes)
    assert not (run.folder / "out.blocks").exists()


def test_the_recipe_beside_a_result_repeats_it_in_python(finished, tmp_path, monkeypatch):
    run = finished("llama")
    file = run.out / "recipe.yaml"
    recipe = yaml.safe_load(file.read_text())
    assert recipe["base"] == "../base" and recipe["data"]["two"] == "../saved:fit"
    assert "out" not in recipe
    monkeypatch.chdir(tmp_path)
    again = run.folder / "again"
    assert calibrate_folder(config=file, out=again) == again
    for name in ("model.safetensors", "recipe.yaml"):
        assert (again / name).read_bytes() == (run.out / name).read_bytes()


@pytest.mark.parametrize("is_noisy", [True, False])
def test_libraries_are_as_noisy_after_a_run_as_before(is_noisy):
    def noise() -> list[Any]:
        bars = datasets.are_progress_bars_disabled(), hf_logging.is_progress_bar_enabled()
        levels = [library.get_verbosity() for library in (datasets.logging, hf_logging)]
        return [*levels, *bars, logger.level, *logger.handlers]

    logger = logging.getLogger("fusion_bench_featcal.run.progress")
    with ExitStack() as after:
        for library, level in ((datasets.logging, logging.INFO), (hf_logging, logging.CRITICAL)):
            after.callback(library.set_verbosity, library.get_verbosity())
            library.set_verbosity(level)
        after.callback(datasets.enable_progress_bars)
        after.callback(hf_logging.enable_progress_bar)
        if not is_noisy:
            datasets.disable_progress_bars()
            hf_logging.disable_progress_bar()
        before = noise()
        with screen.quiet():
            assert noise() != before and datasets.are_progress_bars_disabled()
        assert noise() == before


def test_paths_of_a_recipe_start_at_its_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    models = {"one": "one", "two": "./two", "three": "../absent", "four": "org/model"}
    models["x"] = "x.jsonl"
    lines = {"merged": "merged", "expert": models, "data": {"one": "one.jsonl", "two": "one:fit"}}
    recipe = options.with_full_paths(lines, Request, Path("link"))
    full = {name: str(folder / name) for name in ("one", "two")}
    full |= {"three": str(folder.parent / "absent"), "four": "org/model", "x": "x.jsonl"}
    assert recipe["expert"] == full and recipe["merged"] == str(folder / "merged")
    assert recipe["data"] == {"one": str(folder / "one.jsonl"), "two": f"{folder / 'one'}:fit"}


def test_options_have_priority_over_a_recipe(finished):
    run, more = finished("llama"), {"set": {"seed": 1}, "data": {"two": finished("bert").folder}}
    recipe = read_request(
        {"config": run.out / "recipe.yaml", "out": "new", "preset": "plus", **more}
    )
    assert (recipe.settings.seed, recipe.settings.samples_per_task) == (1, ROWS)
    assert recipe.data == {"one": f"{run.folder}/one.jsonl", "two": str(more["data"]["two"])}
    assert recipe.preset == "plus" and recipe.settings.rule


def test_models_that_do_not_fit_are_merged_and_evaluated_from_files(finished, folder, monkeypatch):
    whole = finished("llama")  # merged before, not during the run
    with monkeypatch.context() as patch:
        patch.setattr(transformers_models, "free_bytes", lambda device: 0)
        forbid_loading(patch)
        patch.setattr("fusion_bench_featcal.models.saving.LARGEST_FILE", 2000)
        more = ("--merge", "task_arithmetic:0.4", "--set", f"samples_per_task={ROWS}")
        assert main(words(folder, *PAPER, *more, merged=None)) == 0
    assert len(list((folder / "out").glob("model-*.safetensors"))) > 1
    expected = weights(whole.out)
    for name, value in weights(folder / "out").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    report = read_run(folder / "out" / "featcal")
    for row, before in (("experts", "experts"), ("task_arithmetic", "merged"), ("featcal",) * 2):
        losses = [of.row(n).scores["loss"] for of, n in ((report, row), (whole.report, before))]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    reads = json.loads((folder / "out" / "featcal" / "reads.json").read_text())
    files = sum(tensor.nbytes for task in TASKS for tensor in weights(folder / task).values())
    assert reads["upstream"] == {"merger": "task_arithmetic", "experts": files}
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "llama"


def test_files_keep_their_dtype(folder):
    for name in ("base", "merged", *TASKS):
        file = folder / name / "model.safetensors"
        half = {key: tensor.bfloat16() for key, tensor in load_file(file).items()}
        save_file(half, file, {"format": "pt"})
    assert main(words(folder, *PAPER)) == 0
    before, after = weights(folder / "merged"), weights(folder / "out")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)


# --- kinds of models and data ---


def test_lora_adapters_are_experts(finished):
    run = finished("lora")
    assert f"  merge: simple_average\n  base: {run.folder / 'base'}\n  expert one: " in run.screen
    assert run.screen.count("-lora (adapter)") == len(TASKS)
    reads = json.loads((run.out / "featcal" / "reads.json").read_text())
    for task, read in reads["experts"].items():  # of the adapter alone
        adapter = load_file(run.folder / f"{task}-lora" / "adapter_model.safetensors")
        assert read == sum(tensor.nbytes for tensor in adapter.values())
    assert reads["upstream"]["experts"] == sum(reads["experts"].values())
    assert f"plan: {round(reads['upstream']['experts'] / 1024)} KiB read from experts" in run.screen
    names = changed(AutoModelForCausalLM.from_pretrained(run.out), run.models["base"])
    assert any(name.endswith("q_proj.weight") for name in names)
    assert not any("embed" in name for name in names)
    assert AutoTokenizer.from_pretrained(run.out).chat_template == CHAT
    notes = " ".join(note.text for note in run.report.notes)
    assert notes.count("the tokenizer's chat template is not applied to these prompts") == 2


@pytest.mark.slow
@pytest.mark.ci
def test_an_encoder_decoder_whose_expert_writes_missing_targets(finished):
    run = finished("t5")
    names = changed(type(run.models["base"]).from_pretrained(run.out), run.models["merged"])
    assert any(name.startswith("decoder") for name in names) and "shared.weight" not in names
    note = "one: no targets in --data, so its expert generates them. If id contains them: --columns"
    assert f"{note} one:prompt=prompt,target=COLUMN" in " ".join(run.screen.split())
    assert "two: no targets" not in run.screen
    assert run.report.accuracy["experts"]["one"] == 1  # of answers that it has written itself


def test_text_classifiers_keep_their_heads(finished):
    run = finished("bert")
    names = changed(BertForSequenceClassification.from_pretrained(run.out), run.models["merged"])
    assert names and all(name.startswith("bert.encoder.") for name in names)
    head = load_file(run.out / "heads" / "two" / "head.safetensors")
    pooler = {f"bert.pooler.dense.{leaf}" for leaf in ("weight", "bias")}
    assert set(head) == {"classifier.weight", "classifier.bias"} | pooler
    expert = run.models["two"].state_dict()
    assert all(torch.equal(value, expert[name]) for name, value in head.items())
    assert items(run, "two") == HELD_OUT


def test_one_body_is_in_memory_while_classifiers_are_scored(tmp_path, monkeypatch):
    classifier_folders(tmp_path)
    load, bodies = transformers_models.TransformersModels.load_expert, list[Any]()

    def watched(self: transformers_models.TransformersModels, task: str) -> Any:
        gc.collect()
        assert not any(body() for body in bodies)
        expert: Any = load(self, task)
        bodies.append(weakref.ref(expert.bert))
        return expert

    monkeypatch.setattr(transformers_models.TransformersModels, "load_expert", watched)
    assert featcal(*words(tmp_path, *PAPER)).code == 0 and len(bodies) == 2


@pytest.mark.parametrize("kind", ["bert", "vit"])
def test_the_card_loads_the_body_with_a_head(finished, monkeypatch, kind):
    run = finished(kind)
    card = (run.out / "README.md").read_text()
    assert "loads with the head of merged" in card
    usage, code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    monkeypatch.chdir(run.out)
    values: dict[str, Any] = {}
    exec(usage.replace("FOLDER", "."), values)
    assert values["model"] and ("tokenizer" if kind == "bert" else "processor") in values
    exec(code.replace("NAME", "two"), values)
    models = values["model"], run.models["two"], type(values["model"]).from_pretrained(run.out)
    state, expert, saved = (model.state_dict() for model in models)
    head = {*load_file(run.out / "heads" / "two" / "head.safetensors")}
    assert all(torch.equal(state[n], expert[n] if n in head else saved[n]) for n in state)


def test_image_classifiers(finished):
    run = finished("vit")
    assert changed(type(run.models["base"]).from_pretrained(run.out), run.models["merged"])
    assert (run.out / "preprocessor_config.json").is_file()
    assert items(run, "one") == items(run, "two") == HELD_OUT
    losses = [row.scores["loss"]["one"] for row in run.report.rows]
    assert len(losses) == len(set(losses)) == 3  # heads are the same, bodies are not


def test_a_whole_clip_keeps_its_text_tower(finished):
    run = finished("clip")
    names = changed(type(run.models["base"]).from_pretrained(run.out), run.models["merged"])
    assert names and all(name.startswith("vision_model.encoder.") for name in names)
    assert list(run.report.accuracy) == ["experts", "merged", "featcal"]
    assert CLIPProcessor.from_pretrained(run.out)(text=["a star"])["input_ids"]


@pytest.mark.parametrize("more", [["--no-eval"], ["--no-eval", *PAPER], []])
def test_the_next_command_reports_the_result(more, folder, monkeypatch):
    monkeypatch.chdir(folder)
    for words_of_run in (words(folder, *more), words(folder, *more, "--resume")):
        (line,) = re.findall(r"^next: featcal (.*)$", featcal(*words_of_run).out, re.MULTILINE)
        report = featcal(*shlex.split(line))
        assert report.code == 0, report.err
        drift = "out: relative_drift" if more else "out: accuracy, %"
        assert drift in report.out and "per task: featcal" in report.out
    run = read_run(folder / "out" / "featcal").rows[-1]
    assert {*run.scores["relative_drift"]} == {*TASKS}


# --- verdict ---


def test_strict_saves_only_where_no_task_is_worse(copied, folder, capsys):
    ridge, bert = ("--set", "ridge_lambda=1e12"), copied("bert")  # the result is the anchor
    assert main(words(bert, *PAPER, *ridge, "--strict")) == 0
    screen, report = capsys.readouterr().out, read_run(bert / "out" / "featcal")
    advice = next(note.text for note in report.notes if note.kind == "verdict")
    assert (
        advice.startswith("Cannot tell whether the repaired model is better") and advice in screen
    )
    assert "Give more test examples with --eval NAME=FILE" in advice
    assert [line.split()[-1] for line in screen.splitlines() if line[:4] in ("one ", "two ")] == [
        "unclear"
    ] * 2
    write_rows(folder / "one.jsonl", sentences("one", ROWS)[:1] * ROWS)  # an interval of 0
    noise: Any = scatter(llama_model(), 5, 2.0)  # an expert of nothing
    noise.save_pretrained(folder / "one")
    far = ("--set", "anchor_rho=300", "--strict")
    assert main(words(folder, *PAPER, *ridge, *far)) == 1
    screen = capsys.readouterr()
    first = "Check the warnings first. Do not use the repaired model: it is worse than the merged"
    (line,) = (line for line in screen.out.splitlines() if line.startswith(first))
    assert "Try more samples (--set samples_per_task=N), --preset plus" in line
    weak = "\nwarning: experts no better than the merged model on their own examples: one ("
    assert weak in screen.out
    assert "--strict: nothing was saved" in screen.err
    assert not (folder / "out").exists() and not (folder / "out.blocks").exists()


def test_one_folder_of_two_experts_is_noted(folder):
    (folder / "link").symlink_to("one")
    more = ("--plan", "--eval", f"one={folder / 'one.jsonl'}")
    done = featcal(*words(folder, *more, experts=("one", "link")))
    assert done.code == 0, done.err
    assert "  --expert one and --expert two are the same model\n" in done.out
    assert "  --data one and --eval one are the same data\n" in done.out
    assert "are the same" not in featcal(*words(folder, "--plan")).out


def test_strict_saves_nothing_if_there_are_warnings(folder, capsys):
    """Hardly an answer of the experts is right, and the result is the merged model."""
    ridge = ("--set", "ridge_lambda=1e12")
    assert main(words(folder, *PAPER, *ridge, "--strict")) == 1
    screen = capsys.readouterr()
    assert "Check the warnings first. Cannot tell whether" in screen.out
    assert "there are warnings. The merged model is unchanged" in screen.err
    assert not (folder / "out").exists() and not (folder / "out.blocks").exists()


def test_strict_refuses_what_it_cannot_trust_before_a_model_is_opened(copied):
    folder = copied("bert")
    (folder / "link.jsonl").symlink_to("one.jsonl")
    line = error_of(*words(folder, "--strict", data=("one.jsonl", "link.jsonl")))
    assert "--strict: --data one and --data two are the same data. Correct it" in line
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", [{"text": r["prompt"]} for r in sentences(task, ROWS)])
    line = error_of(*words(folder, "--strict"))
    reason = "no task can be scored (one: not scored, because its examples have no label"
    assert reason in line
    assert not (folder / "out").exists()


def test_splits_of_one_folder_are_different_data(folder, monkeypatch):
    tables: Any = {task: datasets.Dataset.from_list(sentences(task, ROWS)) for task in TASKS}
    datasets.DatasetDict(tables).save_to_disk(str(folder / "saved"))
    plan = words(folder, "--plan", data="saved:{}")
    assert "are the same" not in featcal(*plan).out
    same = "--data one and --eval one are the same data"
    assert f"  {same}\n" in featcal(*plan, "--eval", f"one={folder}/saved/one").out
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: tables["one"])
    hub_options = [f"--{name}=one=org/data:train" for name in ("data", "eval")]
    hub_options += ["--data", f"two={folder / 'two.jsonl'}", "--strict"]
    assert error_of(*words(folder, *hub_options, data=())).startswith(f"--strict: {same}. Correct")


def test_without_scores_warnings_come_first(copied):
    """Task two has task one's rows under another name, and both have rows without labels."""
    folder = copied("bert")
    rows = [{"text": row["prompt"]} for row in sentences("one", 200)]
    write_rows(folder / "one.jsonl", rows)
    (folder / "link.jsonl").symlink_to("one.jsonl")
    done = featcal(*words(folder, *PAPER, data=("one.jsonl", "link.jsonl")))
    assert done.code == 0, done.err
    advice = (
        "Check the warnings first. Cannot tell whether the repaired model is "
        "better than the merged model: no scores. Give"
    )
    warning = "warning: --data one and --data two are the same data\n"
    assert done.out.index(advice) < done.out.index(warning)
    assert "two: not scored, because its examples have no label" in done.out
    assert "too few examples" not in done.out and "evaluated on" not in done.out


def test_plan_note_and_card_name_what_stays_as_merged(folder: Path) -> None:
    more = words(folder, "--preset", "paper", "--no-eval", "--set", "modules=['!mlp.*']")
    differ = "odules left unchanged although experts differ in them"
    text = f"m{differ}: model.layers.*.mlp (6 matrices), model.embed_tokens, lm_head"
    plan = featcal(*more, "--plan").out
    assert f"\n{text}\n" in plan
    assert "\nmemory: about 0." in plan and "\ntime: about " in plan
    limited = featcal(*more, "--plan", "--set", "expert_read_budget=50%").out
    assert "even if experts differ in them (only names were read): model.layers.*.mlp" in limited
    done = featcal(*more)
    assert f"note: featcal: {text}\n" in done.out and text not in done.err
    names = ", ".join(f"`{name}`" for name in text.partition(": ")[2].split(", "))
    assert f"\n- M{differ}: {names}\n" in (folder / "out/README.md").read_text()


def test_heads_of_classifiers_have_their_own_poolers(finished: Any) -> None:
    card = (finished("bert").out / "README.md").read_text()
    assert "Modules left unchanged" in card and "`embeddings (3 matrices)`" in card
    assert "pooler" not in card


# --- tasks without an expert ---


def test_a_task_without_an_expert_is_compared_and_not_calibrated(folder: Path) -> None:
    """Its samples change nothing, and base, merged and repaired model are scored."""
    shutil.copy(folder / "two.jsonl", folder / "other.jsonl")
    done = featcal(*words(folder, *PAPER, "--eval", f"other={folder / 'other.jsonl'}"))
    assert done.code == 0, done.err
    assert "\n  other: no samples; evaluated on " in done.out
    table = done.out.partition("\nnot calibrated on: accuracy, %\n")[2].splitlines()
    assert table[1].split()[:4] == ["examples", "base", "merged", "repaired"]
    assert (
        table[3].split()[0] == "other" and "other" not in done.out.partition("not calib")[0][-900:]
    )
    report = read_run(folder / "out" / "featcal")
    assert [*report.accuracy["merged"]] == [*TASKS, "average"]
    assert any(note.task == "other" for note in report.notes if note.kind == "verdict")
    assert "not calibrated on: accuracy, %" in (folder / "out" / "README.md").read_text()
    first = (folder / "out" / "model.safetensors").read_bytes()
    shutil.rmtree(folder / "out")
    assert featcal(*words(folder, *PAPER)).code == 0
    assert (folder / "out" / "model.safetensors").read_bytes() == first


def test_mistyped_names_of_test_data_are_refused(folder: Path, copied: Any) -> None:
    line = error_of(*words(folder, "--eval", f"onee={folder / 'one.jsonl'}"))
    assert line.startswith("--eval: expert onee is unknown (nearest: 'one')")
    both = [f"--eval={name}={folder / 'one.jsonl'}" for name in ("one", "onee")]
    assert featcal(*words(folder, *both, "--plan")).code == 0  # `one` has its own: no mistake
    write_rows(folder / "plain.jsonl", [{"prompt": "a b"}] * 4)
    line = error_of(*words(folder, "--eval", f"other={folder / 'plain.jsonl'}"))
    assert "has no targets, and no expert can generate them" in line
    bert = copied("bert")
    line = error_of(*words(bert, "--eval", f"other={bert / 'one.jsonl'}"))
    assert line == (
        "--eval other: the evaluation needs the head of an expert of this name, but there is none"
    )
