"""Tiny encoders without a head: a BERT with sentence-transformers' files, and a DINOv2."""

import json
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import SequenceClassificationModelPool
from tiny_models import scatter
from tiny_texts import NAMES, TASKS, WORDS, sentences, word_tokenizer, write
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel, Dinov2Config, Dinov2Model

SIZES: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24
}  # fmt: skip


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


# --- sentence-transformers' files, as all-MiniLM-L6-v2 has them ---

LENGTH = 7
"""Tokens of the longest text."""
MODES = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token",
         "last": "pooling_mode_lasttoken", "max": "pooling_mode_max_tokens"}  # fmt: skip
FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "",
         "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ],
    "1_Pooling/config.json": {
        "word_embedding_dimension": 16, **{flag: mode == "mean" for mode, flag in MODES.items()}
    },
    "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
    "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": False},
}  # fmt: skip


def pooling(mode: str) -> dict[str, Any]:
    """Config of a pooling as sentence-transformers 6 writes it."""
    return {"embedding_dimension": 16, "pooling_mode": mode}


def write_sentence_files(folder: Path, **changes: Any) -> None:
    """Write the files of sentence-transformers, with other contents for some."""
    for name, content in (FILES | changes).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def embeddings(model: Any, folder: Path, texts: list[str]) -> torch.Tensor:
    """Mean of each text's states, one text at a time, of norm 1."""
    encode, rows = AutoTokenizer.from_pretrained(folder), []
    for text in texts:
        ids = encode(text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(model.eval()(input_ids=ids).last_hidden_state[0].mean(dim=0))
    return F.normalize(torch.stack(rows), dim=-1)


def encoder_pool(folder: Path) -> Any:
    """A base and two experts on disk, with data in memory."""
    key, models = "pretrained_model_name_or_path", {}
    for seed, name in enumerate(NAMES):
        path = write(encoder("bert", seed), folder / name.strip("_"))
        models[name] = {"_target_": "transformers.AutoModel.from_pretrained", key: path}
    base = folder / "pretrained"
    write_sentence_files(base, **{"1_Pooling/config.json": pooling("mean")})
    word_tokenizer().save_pretrained(base)
    tokenizer: Any = {"_target_": "transformers.AutoTokenizer.from_pretrained", key: str(base)}
    data: Any = {f"{split}_datasets": {task: {} for task in TASKS} for split in ("train", "test")}
    pool: Any = SequenceClassificationModelPool(models, tokenizer=tokenizer, **data)  # type: ignore[arg-type]
    pool.load_train_dataset = pool.load_test_dataset = lambda task: [
        {"text": row["prompt"], "label": row["target"]} for row in sentences(task, 12)
    ]
    return pool
