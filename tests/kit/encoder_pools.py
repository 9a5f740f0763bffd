"""Pools of tiny encoders without a head: a BERT with sentence-transformers' files, a DINOv2."""

from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import CLIPVisionModelPool, SequenceClassificationModelPool
from sample_pools import RESCALE
from tiny_encoders import write_sentence_files
from tiny_images import picture
from tiny_models import scatter
from tiny_texts import NAMES, TASKS, WORDS, sentences, word_tokenizer, write
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24
}  # fmt: skip
LOADERS = {"bert": "AutoTokenizer", "dino": "AutoImageProcessor"}


def encoder(kind: str, seed: int = 0) -> Any:
    """A base (seed 0) or an expert near it, which differs in its blocks, as LoRA experts do."""
    torch.manual_seed(0)
    if kind == "bert":
        base = BertModel(BertConfig(vocab_size=len(WORDS), max_position_embeddings=16, **SIZES))
    else:
        base = Dinov2Model(Dinov2Config(image_size=28, patch_size=14, mlp_ratio=2, **SIZES))
    base = scatter(base.eval(), 0, 0.2)
    expert = scatter(base, seed, 0.1) if seed else base
    outside = {n: t for n, t in base.state_dict().items() if not n.startswith("encoder.layer.")}
    expert.load_state_dict(outside, strict=False)
    return expert


def write_pooling(folder: Path, mode: str = "mean", length: int | None = None) -> None:
    """Files of sentence-transformers that say how a BERT's tokens become an embedding."""
    lengths = {"sentence_bert_config.json": {"max_seq_length": length}}
    write_sentence_files(folder, **{"1_Pooling/config.json": {"pooling_mode": mode}}, **lengths)


def rows(kind: str, task: str, number: int = 12) -> list[dict[str, Any]]:
    if kind == "bert":
        return [{"text": r["prompt"], "label": r["target"]} for r in sentences(task, number)]
    start = 100 * TASKS.index(task)
    return [{"image": picture(start + n), "label": n % 3} for n in range(number)]


def encoder_pool(kind: str, folder: Path, mode: str = "mean", length: int | None = None) -> Any:
    """A base and two experts on disk, with train and test data in memory."""
    key, models = "pretrained_model_name_or_path", {}
    for seed, name in enumerate(NAMES):
        path = write(encoder(kind, seed), folder / name.strip("_"))
        models[name] = {"_target_": "transformers.AutoModel.from_pretrained", key: path}
    base = folder / "pretrained"
    processor = {"_target_": f"transformers.{LOADERS[kind]}.from_pretrained", key: str(base)}
    data: Any = {f"{split}_datasets": {task: {} for task in TASKS} for split in ("train", "test")}
    if kind == "bert":
        write_pooling(base, mode, length)
        word_tokenizer().save_pretrained(base)
        pool: Any = SequenceClassificationModelPool(models, tokenizer=processor, **data)  # type: ignore[arg-type]
    else:
        RESCALE.save_pretrained(base)
        pool = CLIPVisionModelPool(models, processor=processor, **data)  # type: ignore[arg-type]
    pool.load_train_dataset = pool.load_test_dataset = lambda task: rows(kind, task)
    return pool
