"""Tiny checkpoints and datasets in the place of everything that stock pools name."""
# pyright: reportCallIssue=false, reportOptionalMemberAccess=false, reportArgumentType=false

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from tiny_images import picture, write_clip
from tiny_models import scatter, t5_model
from tiny_texts import WORDS, word_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    CLIPModel,
    CLIPVisionModel,
    ConvNextImageProcessor,
    GPT2Config,
    GPT2ForSequenceClassification,
)

DECODERS = {
    "mixtral": r"mixtral",
    "gemma2": r"gemma-2",
    "llama": r"deepseek-v2|llama|vicuna|wizardmath",
    "qwen2": r"qwen",
    "mistral": r"mistral|path_to_your",
}
CLIPS = {"large-patch14": (14, 3), "base-patch16": (7, 2), "base-patch32": (14, 2)}
# Mixtures multiply bfloat16 rows of a multiple of eight numbers only.
_SIZES = {
    "vocab_size": len(WORDS) + 1, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
    "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
_SMALL_VISION = {
    "convnext": {"hidden_sizes": [8, 12], "depths": [1, 1], "num_stages": 2, "image_size": 32},
    "resnet": {"hidden_sizes": [8, 12], "depths": [1, 1], "embedding_size": 8,
               "layer_type": "basic"},
    "dinov2": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
               "image_size": 28, "patch_size": 14},
}  # fmt: skip
SPLITS = ("train", "test", "validation", "gaussian_noise")
GLUE_COLUMNS = {
    "cola": ["sentence"], "sst2": ["sentence"], "mrpc": ["sentence1", "sentence2"],
    "rte": ["sentence1", "sentence2"], "stsb": ["sentence1", "sentence2"],
    "qnli": ["question", "sentence"], "qqp": ["question1", "question2"],
    "mnli": ["premise", "hypothesis"],
}  # fmt: skip


class StandIns:
    """Folders that take the place of hub ids, each made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def model(self, hub_id: str) -> str:
        """Folder of the stand-in for a model, a tokenizer or a processor."""
        folder = self.root / "models" / hub_id.strip("./").replace("/", "--")
        if not folder.exists():
            seed = len(list(folder.parent.iterdir())) if folder.parent.is_dir() else 0
            folder.mkdir(parents=True)
            make = next(make for key, make in _MAKERS.items() if re.search(key, hub_id.lower()))
            make(folder, seed)
        return str(folder)

    def images(self, *, image: str = "image", label: str = "label", config: str = "default") -> str:
        """Folder of a dataset of pictures with ten classes."""
        columns = {image: [picture(n) for n in range(10)], label: [n % 10 for n in range(10)]}
        features = datasets.Features({image: datasets.Image(), label: datasets.Value("int64")})
        if image == "jpg":  # as a WebDataset has them
            columns |= {"__key__": ["k"] * 10, "__url__": ["u"] * 10}
            features |= {name: datasets.Value("string") for name in ("__key__", "__url__")}
        return self._table(f"images-{image}-{config}", columns, datasets.Features(features), config)

    def _table(self, name: str, columns: Any, features: Any, config: str) -> str:
        folder = self.root / "data" / name
        if not folder.exists():
            rows = datasets.Dataset.from_dict(columns, features=features)
            head = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n"
            for split in SPLITS:
                rows.to_parquet(folder / f"{split}.parquet")
                head += f"  - split: {split}\n    path: {split}.parquet\n"
            (folder / "README.md").write_text(f"{head}---\n")
        return str(folder)

    def texts(self) -> str:
        """A JSONL file of prompts and targets."""
        file = self.root / "texts.jsonl"
        if not file.exists():
            rows = [f'{{"prompt": "{a} {b} {c}", "target": "{b}"}}' for a, b, c in _triples(12)]
            file.write_text("\n".join(rows) + "\n")
        return str(file)


def glue(name: str, task: str) -> datasets.DatasetDict:
    """Stand-in of `datasets.load_dataset("glue", task)`."""
    assert name == "glue"
    columns: dict[str, Any] = {
        column: [" ".join(words) for words in _triples(6)] for column in GLUE_COLUMNS[task]
    }
    columns |= {"label": [n % 2 for n in range(6)], "idx": list(range(6))}
    last = "validation_matched" if task == "mnli" else "validation"
    table = datasets.Dataset.from_dict(columns)
    return datasets.DatasetDict({"train": table, last: table})


def _triples(number: int) -> list[tuple[str, str, str]]:
    letters = WORDS[3:]
    return [
        (letters[n], letters[(3 * n + 1) % 20], letters[(7 * n + 2) % 20]) for n in range(number)
    ]


def _save(model: Any, folder: Path, seed: int, processor: Any = None) -> None:
    scatter(model, seed, 0.05).save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)


def _clip(folder: Path, seed: int) -> None:
    write_clip(folder, seed)
    config = CLIPModel.config_class.from_pretrained(folder)
    size = next(size for name, size in CLIPS.items() if name in folder.name.lower())
    config.vision_config.patch_size, config.vision_config.num_hidden_layers = size
    config.text_config.max_position_embeddings = 256  # the tokenizer splits into letters
    torch.manual_seed(0)
    _save(CLIPModel(config), folder, seed)


def _clip_lora(folder: Path, seed: int) -> None:
    model: Any = CLIPVisionModel.from_pretrained(folder.parent / "openai--clip-vit-base-patch16")
    # FusionBench puts LoRA on the tower inside, which from transformers 5.6 on is the model.
    _adapter(getattr(model, "vision_model", model), folder, seed, ["q_proj", "v_proj"])


def _adapter(model: Any, folder: Path, seed: int, targets: list[str]) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)


def _t5(folder: Path, seed: int) -> None:
    model = t5_model(untied=True, vocab_size=len(WORDS), d_kv=4, tie_word_embeddings=False)
    _save(model, folder, seed, word_tokenizer(ends=True, model_max_length=64))


def _t5_lora(folder: Path, seed: int) -> None:
    size = "large" if "large" in folder.name else "base"
    base = folder.parent / f"google--flan-t5-{size}"
    _adapter(AutoModelForSeq2SeqLM.from_pretrained(base), folder, seed, ["q", "v"])


def _gpt2(folder: Path, seed: int) -> None:
    letters = WORDS[3:]
    tokens = [*letters, "Ġ", *(f"Ġ{letter}" for letter in letters), "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "\n".join(f"Ġ {letter}" for letter in letters)
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    torch.manual_seed(0)
    sizes: Any = {"n_positions": 512, "n_embd": 8, "n_layer": 2, "n_head": 2, "num_labels": 3}
    sizes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), len(tokens) - 1)
    config = GPT2Config(vocab_size=len(tokens), **sizes)
    _save(GPT2ForSequenceClassification(config), folder, seed)


def _auto(kind: str, auto: Any, processor: Any, folder: Path, seed: int) -> None:
    """Write a model of a type by one of transformers' automatic classes."""
    sizes = _SMALL_VISION.get(kind, {name: v for name, v in _SIZES.items()
                                     if hasattr(AutoConfig.for_model(kind), name)})  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes)
    if auto is not AutoModelForCausalLM:
        config.num_labels = 10 if kind in _SMALL_VISION else 1
    if folder.name.startswith("MergeBench--Llama"):
        config.vocab_size += 3  # the published experts have more rows than their base
    torch.manual_seed(0)
    _save(auto.from_config(config), folder, seed, processor)


# Two pools pad with Llama 3's own token.
_TOKENIZER = word_tokenizer(words=(*WORDS, "<|end_of_text|>"), model_max_length=64)
_PROCESSOR = ConvNextImageProcessor(size={"shortest_edge": 28}, crop_pct=1.0)
_MAKERS: dict[str, Callable[[Path, int], None]] = {
    "clip-vit.*lora|lora.*clip-vit": _clip_lora,
    "clip-vit": _clip,
    "flan-t5.*lora|lora.*flan-t5": _t5_lora,
    "flan-t5": _t5,
    "gpt2": _gpt2,
    "bradly-terry": partial(_auto, "llama", AutoModelForSequenceClassification, _TOKENIZER),
    **{kind: partial(_auto, kind, AutoModelForImageClassification, _PROCESSOR)
       for kind in _SMALL_VISION},
    **{pattern: partial(_auto, kind, AutoModelForCausalLM, _TOKENIZER)
       for kind, pattern in DECODERS.items()},
}  # fmt: skip
"""By a pattern of hub ids in small letters, of which the first that fits counts."""
