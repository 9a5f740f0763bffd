"""`featcal calibrate` on models that read images, with rows of texts and images."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import change_json, words, write_models, write_rows
from reports import error_of, featcal
from tiny_image_texts import CHAT, image_rows, llava_model, llava_processor
from tiny_texts import TASKS
from transformers import AutoModelForImageTextToText, AutoProcessor, LlamaForCausalLM

from fusion_bench_featcal import CalibrationError, FeatCalSettings, calibrate
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.image_texts import ImageTextBatches
from fusion_bench_featcal.data.pictures import read_image
from fusion_bench_featcal.data.text_formats import Text
from fusion_bench_featcal.data.text_samples import CausalTextEncoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    write_models(folder, llava_model(), llava_processor())
    for number, task in enumerate(TASKS):
        write_rows(folder / f"{task}.jsonl", image_rows(folder, number))
    return folder


def by_hand(folder: Path, task: str) -> list[dict[str, Any]]:
    """The first samples of a task by the processor, without the reader of rows."""
    rows = [json.loads(line) for line in (folder / f"{task}.jsonl").read_text().splitlines()]
    processor, batches = AutoProcessor.from_pretrained(folder / "merged"), list[Any]()
    for row in (rows[n] for n in sample_order(len(rows), task, FeatCalSettings().seed)[:12]):
        if "messages" in row:
            parts, answer = (turn["content"] for turn in row["messages"])
            text = "u " + " ".join(part.get("text", "<image>") for part in parts)
            images = [folder / part["path"] for part in parts if "path" in part]
        else:
            text, answer = f"u <image> {row['prompt']}", row["target"]
            images = [folder / row["image"]]
        pictures = [read_image(image, "") for image in images] or None
        options = {"return_tensors": "pt", "add_special_tokens": False}
        batch = dict(processor(text=[f"{text} a {answer} </s>"], images=pictures, **options))
        labels = batch["input_ids"].clone()
        labels[:, :-2] = -100
        batches.append(batch | {"labels": labels})
    return batches


def test_towers_and_decoder_are_those_that_python_gives(folder: Path, tmp_path: Path):
    featcal(*words(folder, "--out", str(tmp_path / "out")))
    load = AutoModelForImageTextToText.from_pretrained
    base, merged, *experts = (load(folder / name) for name in ("base", "merged", *TASKS))
    result = calibrate(
        merged, base, dict(zip(TASKS, experts, strict=True)),
        {task: by_hand(folder, task) for task in TASKS},
        FeatCalSettings(rule="plus", samples_per_task=12), progress=False,
    )  # fmt: skip
    repaired, right = load(tmp_path / "out").state_dict(), result.model.state_dict()
    assert all(torch.equal(tensor, right[name]) for name, tensor in repaired.items())
    towers = [
        n for n in right if "vision" in n and not torch.equal(right[n], merged.state_dict()[n])
    ]
    assert towers
    AutoProcessor.from_pretrained(tmp_path / "out")


def test_rows_with_images_that_cannot_be_used_are_named(folder: Path, tmp_path: Path):
    one, two = image_rows(tmp_path, 0), image_rows(tmp_path, 1)
    cases = {
        "no answer": (one, {"target": None}, r"one.*line \d+: an example with images needs prompt"),
        "no file": (one, {"image": "missing.png"}, r"line \d+: file .*missing.png cannot be read"),
        "two marks": (
            one,
            {"prompt": "<image> a <image>"},
            r"contain <image> 2 times, but it has 1 images",
        ),
    }
    for plan, (rows, change, message) in zip(["--plan", "", ""], cases.values(), strict=True):
        write_rows(tmp_path / "one.jsonl", [row | change for row in rows])
        write_rows(tmp_path / "two.jsonl", two)
        data = [str(tmp_path / f"{task}.jsonl") for task in TASKS]
        out = "--out", str(tmp_path / "out"), *filter(None, [plan])
        error = error_of(*words(folder, *out, data=data))
        assert re.search(message, error), error
        assert not (tmp_path / "out").exists()


def test_an_expert_without_the_tower_is_named_before_the_run(folder: Path, tmp_path: Path):
    text = tmp_path / "text"
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder / "one")
    LlamaForCausalLM(whole.config.text_config).save_pretrained(text)
    more = words(folder, "--out", str(tmp_path / "out"), "--plan", experts=(str(text), "two"))
    assert re.search(r"--expert one=.*text lacks the tower of .*remove the images", error_of(*more))


def chats(folder: Path, rows: list[dict[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Prompts with images as chats, with other columns."""
    made = list[dict[str, Any]]()
    for row in rows:
        user, answer = {"role": "user", "content": row["prompt"]}, {"role": "assistant"}
        turns = [user, answer | {"content": row["target"], "reasoning_content": "w"}]
        made.append({"messages": turns, "images": [str(folder / row["image"])]} | more)
    return made


def test_columns_and_keys_that_are_not_read_are_noted(folder: Path, tmp_path: Path):
    rows = chats(folder, image_rows(tmp_path, 0), hint="u", weight=1)
    write_rows(tmp_path / "one.jsonl", [*rows, *({**row, "weight": 0} for row in rows[:3])])
    data = str(tmp_path / "one.jsonl"), str(folder / "two.jsonl")
    screen = featcal(*words(folder, "--out", str(tmp_path / "out"), "--plan", data=data)).out
    screen = " ".join(screen.split())
    assert "not read: hint, reasoning_content of turns, which the template does not" in screen
    assert "left out 3 examples with weight 0 or label false" in screen


def test_tools_generated_answers_and_images_in_answers_are_refused(folder: Path, tmp_path: Path):
    rows = image_rows(tmp_path, 0)
    asks = ["--set", "calibration_targets=generated"]
    answers = [row | {"target": "<image> v"} for row in rows]
    cases: list[tuple[list[dict[str, Any]], list[str], str]] = [
        (chats(tmp_path, rows, tools=[{"name": "u"}]), [], r"line \d+: .* does not render tools"),
        (rows, asks, r"--data one=.* has images, .* leave out --set calibration_targets=generated"),
        (answers, [], r"line \d+: the answer has an image \(<image>\)"),
        ([row | {"target": " "} for row in rows], [], r"line \d+: the answer is empty"),
    ]
    for case, more, message in cases:
        write_rows(tmp_path / "one.jsonl", case)
        data = str(tmp_path / "one.jsonl"), str(folder / "two.jsonl")
        out = "--out", str(tmp_path / "out"), "--plan", *more
        error = error_of(*words(folder, *out, data=data))
        assert re.search(message, " ".join(error.split())), error


def test_errors_of_processors_name_the_row():
    def fails(**_: object) -> None:
        raise IndexError("no image left")

    tokenizer: Any = llava_processor().tokenizer
    tokenizer.chat_template = CHAT
    encoder = CausalTextEncoder(tokenizer)
    text = Text("the row", "prompt", "u", "v")
    with pytest.raises(CalibrationError, match=r"^the row: the processor fails .*no image left"):
        ImageTextBatches([text], fails, encoder, 64).encode(text)


def test_advice_on_answers_keeps_question_and_context(folder: Path, tmp_path: Path):
    rows = [{"question": f"u {c}", "context": "w", "solution": "v"} for c in "abcdefghij"]
    cases = {
        "--columns one:prompt=question,context=context,target=COLUMN": rows,
        "name that column target": [row | {"A": "x", "B": "y"} for row in rows],
    }
    for advice, case in cases.items():
        write_rows(tmp_path / "one.jsonl", case)
        data = str(tmp_path / "one.jsonl"), str(folder / "two.jsonl")
        screen = featcal(*words(folder, "--out", str(tmp_path / "o"), "--plan", data=data)).out
        assert f"If solution contains them: {advice}" in " ".join(screen.split())


def changed(folder: Path, new: Path, change: dict[str, Any], *models: str) -> list[str]:
    """Return the words of a run in which some models' processors have other settings."""
    shutil.copytree(folder, new, ignore=shutil.ignore_patterns("*.png", "*.jsonl"))
    for name in models:
        change_json(new / name / "processor_config.json", change)
    data = [str(folder / f"{task}.jsonl") for task in TASKS]
    return words(new, "--plan", "--out", str(new / "out"), data=data)


@pytest.mark.parametrize(
    "change",
    [{"patch_size": 2}, {"num_additional_image_tokens": 0},
     {"vision_feature_select_strategy": "full"}],
)  # fmt: skip
def test_experts_have_the_same_image_tokens(folder: Path, tmp_path: Path, change: dict[str, Any]):
    line = error_of(*changed(folder, tmp_path / "new", change, "two"))
    ((name, value),) = change.items()
    message = rf"--expert two=.* \({name}: {value!r} instead of .* in .*new/two"
    assert re.search(message, line), line


def test_processors_without_a_patch_size_are_named(folder: Path, tmp_path: Path):
    missing = {"patch_size": None}  # as in files of LLaVA before release 4.45
    line = error_of(*changed(folder, tmp_path / "all", missing, "merged", "base", *TASKS))
    assert "all/merged: its processor has no patch_size. Copy patch_size from" in line
    done = featcal(*changed(folder, tmp_path / "two", missing, "two"))
    assert done.code == 0, done.err
