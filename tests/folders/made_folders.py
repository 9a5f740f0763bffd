"""Folders of tiny models and their data, and arguments of `featcal calibrate` for them."""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_images import SHAPES, write_class_folders, write_clip
from tiny_models import add_up, scatter
from tiny_texts import TASKS, sentences, word_tokenizer, write_adapter
from torch import nn

from fusion_bench_featcal.suites import image

CHAT = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
ROWS = 30
HELD_OUT = ROWS // 5
FEW = ("--set", "samples_per_task=12", "--set", "batch_size=4")
PAPER = ("--preset", "paper")
Models = dict[str, Any]


def words(
    folder: Path,
    *more: str,
    merged: str | None = "merged",
    base: str | None = "base",
    names: Sequence[str] = TASKS,
    experts: Sequence[str] = TASKS,
    data: str | Sequence[str] = "{}.jsonl",
) -> list[str]:
    """Arguments of `featcal calibrate` for models and data of a folder, with the result in `out`.

    `experts` are folders of the experts, `data` the file of each task or a pattern for them.
    """
    arguments = ["calibrate", *([] if merged is None else [str(folder / merged)])]
    arguments += [] if base is None else ["--base", str(folder / base)]
    arguments += ["--out", str(folder / "out"), *FEW]
    files = [data.format(task) for task in TASKS] if isinstance(data, str) else data
    for option, locations in (("--expert", experts), ("--data", files)):
        for name, location in zip(names, locations, strict=False):
            arguments += [option, f"{name}={folder / location}"]
    return [*arguments, *more]


def forbid_loading(patch: pytest.MonkeyPatch) -> None:
    """Let a test fail that loads a model elsewhere than on the meta device."""
    load = hf.PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]

    def loaded(kind: Any, *arguments: Any, **options: Any) -> Any:
        assert options["device_map"] == "meta", "a model was loaded"
        return load(kind, *arguments, **options)

    patch.setattr(hf.PreTrainedModel, "from_pretrained", classmethod(loaded))


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
    return file


def change_json(file: Path, changes: Mapping[str, Any]) -> None:
    """Change keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | dict(changes)))


def write_models(
    folder: Path,
    base: Any,
    processor: Any,
    experts: Mapping[str, Any] | None = None,
    merged: Any = None,
) -> Models:
    """Save base, two experts and their merged model, and return them."""
    if experts is None:
        experts = {task: scatter(base, 10 + n, 0.03) for n, task in enumerate(TASKS)}
    models = {"base": base, **experts, "merged": merged or add_up(base, experts, 0.4)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    return models


def language_folders(folder: Path, base: Any, *, ends: bool = False) -> Models:
    """A language model, two experts, their merged model and texts of each task."""
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", sentences(task, ROWS))
    return write_models(folder, base, word_tokenizer(ends=ends))


def write_adapters(folder: Path, base: nn.Module) -> None:
    """Write a LoRA adapter of rank 2 for each task, as PEFT does."""
    for number, task in enumerate(TASKS):
        write_adapter(folder / f"{task}-lora", base, number, lora_alpha=1)


SIZES: dict[str, Any] = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12
}  # fmt: skip


def classes(*names: str) -> dict[str, Any]:
    """Class names of a head, as keys of its config."""
    return {"id2label": dict(enumerate(names)), "label2id": {n: k for k, n in enumerate(names)}}


def classifier_folders(
    folder: Path,
    kind: Any = hf.BertForSequenceClassification,
    config: Any = hf.BertConfig,
    **more: Any,
) -> Models:
    """Sequence classifiers whose heads have two and three classes, and labelled texts."""
    size: Any = SIZES | {"vocab_size": 23, "max_position_embeddings": 32} | more
    torch.manual_seed(0)
    base: Any = scatter(kind(config(**size)), 0, 0.1)
    merged, experts, body = copy.deepcopy(base), {}, base.base_model_prefix
    for number, task in enumerate(TASKS):
        labels = ("no", "yes", "maybe")[: 2 + number]
        expert: Any = kind(config(**size, **classes(*labels)))
        setattr(expert, body, scatter(base.base_model, 20 + number, 0.03))
        experts[task] = expert
        texts = enumerate(sentences(task, ROWS))
        rows = [{"text": row["prompt"], "label": labels[n % len(labels)]} for n, row in texts]
        write_rows(folder / f"{task}.jsonl", rows)
    bodies = {task: expert.base_model for task, expert in experts.items()}
    setattr(merged, body, add_up(base.base_model, bodies, 0.4))
    return write_models(folder, base, word_tokenizer(model_max_length=32), experts, merged)


def image_classifier_folders(
    folder: Path, kind: Any = hf.ViTForImageClassification, config: Any = hf.ViTConfig, **more: Any
) -> Models:
    """Image classifiers with heads of three classes, and folders of images."""
    size = SIZES | {"image_size": 28, "patch_size": 14}
    values = {"vision_config": size, "text_config": SIZES} if more.pop("towers", False) else size
    torch.manual_seed(0)
    for number, task in enumerate(TASKS):
        write_class_folders(folder / f"{task}-images", per_class=10, seed=number)
    base = scatter(kind(config(**(values | more), **classes(*SHAPES))), 0, 0.1)
    return write_models(folder, base, image.load_processor())


def clip_folders(folder: Path) -> Models:
    """Whole CLIPs whose vision towers differ, and folders of images."""
    write_clip(folder / "base")
    base, experts = hf.CLIPModel.from_pretrained(folder / "base"), {}
    for number, task in enumerate(TASKS):
        expert: Any = hf.CLIPModel.from_pretrained(folder / "base")
        expert.vision_model = scatter(expert.vision_model, 30 + number, 0.03)
        experts[task] = expert
        write_class_folders(folder / f"{task}-images", per_class=10, seed=number)
    return write_models(folder, base, image.load_processor(), experts)
