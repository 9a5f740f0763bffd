"""`featcal calibrate` on models that read images, with rows of texts and images."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from made_folders import words, write_models, write_rows
from reports import error_of, featcal
from tiny_image_texts import image_rows, llava_model, llava_processor
from tiny_texts import TASKS
from transformers import AutoModelForImageTextToText, AutoProcessor, LlamaForCausalLM

from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.data.draws import sample_order
from fusion_bench_featcal.data.pictures import read_image


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
        "no answer": (one, {"target": None}, r"one.*line \d+: a row with images needs prompt"),
        "no file": (one, {"image": "missing.png"}, r"line \d+: file .*missing.png cannot be read"),
        "two marks": (one, {"prompt": "<image> a <image>"}, r"have 2 <image>, and it has 1 images"),
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
    assert re.search(r"--expert one=.*text lacks the tower of .*leave images out", error_of(*more))
