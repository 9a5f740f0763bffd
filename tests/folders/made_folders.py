"""Folders of tiny models and their data, as people have them before `featcal calibrate`."""

import copy
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_images import write_class_folders, write_clip
from tiny_models import add_up, scatter
from tiny_texts import TASKS, llama_model, sentences, t5_model, word_tokenizer
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    CLIPImageProcessor,
    CLIPModel,
    ViTConfig,
    ViTForImageClassification,
)

CHAT = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}"
ROWS = 30


Models = dict[str, Any]


def made_once(make: Callable[[Path], Models]) -> Callable[[Path], Models]:
    """Make folders once in a process, and copies of them and of their models for each test."""

    @cache
    def original() -> tuple[TemporaryDirectory[str], Models]:
        folder = TemporaryDirectory()  # removed when the process ends
        return folder, make(Path(folder.name))

    @wraps(make)
    def copied(folder: Path) -> Models:
        place, models = original()
        shutil.copytree(place.name, folder, dirs_exist_ok=True)
        return copy.deepcopy(models)

    return copied


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows), encoding="utf-8")
    return file


def write_models(
    folder: Path, base: Any, processor: Any, experts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Save base, two experts and their merged model; return them in memory."""
    if experts is None:
        experts = {task: scatter(base, 10 + n, 0.03) for n, task in enumerate(TASKS)}
    models = {"base": base, **experts, "merged": add_up(base, experts, 0.4)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    return models


@made_once
def llama_folders(folder: Path) -> dict[str, Any]:
    """A Llama, two experts, their merged model and texts of each task."""
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", sentences(task, ROWS))
    return write_models(folder, llama_model(), word_tokenizer())


@made_once
def t5_folders(folder: Path) -> dict[str, Any]:
    """The same with a T5."""
    for task in TASKS:
        write_rows(folder / f"{task}.jsonl", sentences(task, ROWS))
    return write_models(folder, t5_model(), word_tokenizer(ends=True))


def write_adapters(folder: Path, base: nn.Module) -> None:
    """Write a LoRA adapter of rank 2 for each task, as PEFT does."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "bias": "none"}
    for number, task in enumerate(TASKS):
        generator = torch.Generator().manual_seed(number)
        tensors = {}
        for name, module in base.named_modules():
            if name.endswith(("q_proj", "down_proj", "query")) and isinstance(module, nn.Linear):
                start = f"base_model.model.{name}.lora_"
                down = torch.randn(2, module.in_features, generator=generator)
                up = torch.randn(module.out_features, 2, generator=generator)
                tensors |= {f"{start}A.weight": down, f"{start}B.weight": 0.05 * up}
        adapter = folder / f"{task}-lora"
        adapter.mkdir()
        save_file(tensors, adapter / "adapter_model.safetensors")
        (adapter / "adapter_config.json").write_text(json.dumps(config))


@made_once
def classifier_folders(folder: Path) -> dict[str, Any]:
    """BERT sequence classifiers whose heads have two and three classes, and labelled texts."""
    size: Any = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    size |= {"intermediate_size": 12, "vocab_size": 23, "max_position_embeddings": 32}
    torch.manual_seed(0)
    base = scatter(BertForSequenceClassification(BertConfig(**size, num_labels=2)), 0, 0.1)
    experts = {}
    for number, task in enumerate(TASKS):
        labels = ["no", "yes", "maybe"][: 2 + number]
        config = BertConfig(**size, id2label=dict(enumerate(labels)), label2id=_numbered(labels))
        expert = BertForSequenceClassification(config)
        expert.load_state_dict(base.state_dict() | _head(expert))
        experts[task] = scatter(expert, 20 + number, 0.03)
        rows = [
            {"text": row["prompt"], "label": labels[n % len(labels)]}
            for n, row in enumerate(sentences(task, ROWS))
        ]
        write_rows(folder / f"{task}.jsonl", rows)
    tokenizer = word_tokenizer(model_max_length=32)
    merged_of = {task: _with_head_of(base, expert) for task, expert in experts.items()}
    models = {"base": base, **experts, "merged": add_up(base, merged_of, 0.4)}
    for name, model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return models


def _numbered(labels: list[str]) -> dict[str, int]:
    return {label: number for number, label in enumerate(labels)}


def _head(model: nn.Module) -> dict[str, Any]:
    return {n: t for n, t in model.state_dict().items() if n.startswith("classifier.")}


def _with_head_of(base: nn.Module, expert: nn.Module) -> nn.Module:
    """An expert whose head is the base's, so that both add up."""
    model = scatter(base, 0, 0)
    tensors = {n: t for n, t in expert.state_dict().items() if not n.startswith("classifier.")}
    model.load_state_dict(base.state_dict() | tensors)
    return model


@made_once
def image_classifier_folders(folder: Path) -> dict[str, Any]:
    """ViT image classifiers with heads of three classes, and folders of images."""
    config = ViTConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        image_size=28, patch_size=14, id2label={0: "circle", 1: "square", 2: "star"},
        label2id={"circle": 0, "square": 1, "star": 2},
    )  # fmt: skip
    torch.manual_seed(0)
    processor = CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    for number, task in enumerate(TASKS):
        write_class_folders(folder / f"{task}-images", per_class=10, seed=number)
    return write_models(folder, scatter(ViTForImageClassification(config), 0, 0.1), processor)


@made_once
def clip_folders(folder: Path) -> dict[str, Any]:
    """Whole CLIPs whose vision towers differ, and folders of images."""
    write_clip(folder / "base")
    base = CLIPModel.from_pretrained(folder / "base")
    from fusion_bench_featcal.suites import image

    experts = {}
    for number, task in enumerate(TASKS):
        expert: Any = CLIPModel.from_pretrained(folder / "base")
        expert.vision_model = scatter(expert.vision_model, 30 + number, 0.03)
        experts[task] = expert
        write_class_folders(folder / f"{task}-images", per_class=10, seed=number)
    return write_models(folder, base, image.load_processor(), experts)
