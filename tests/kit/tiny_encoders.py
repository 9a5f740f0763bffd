"""A tiny BERT with the files of all-MiniLM-L6-v2, and its embeddings by a plain computation."""

import json
from pathlib import Path
from typing import Any

import torch
from tiny_models import scatter
from tokenizers import BertWordPieceTokenizer
from torch import nn
from torch.nn import functional as F
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedTokenizerFast

CLASSES = ["play music", "weather", "book a table", "alarm"]
LENGTH = 7
"""Tokens of the longest text, with the two marks of BERT."""
POOLING = {f"pooling_mode_{kind}": False for kind in ("cls_token", "max_tokens")}
POOLING |= {"pooling_mode_mean_tokens": True}
FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "",
         "type": f"sentence_transformers.models.{kind}"}
        for n, kind in enumerate(("Transformer", "Pooling", "Normalize"))
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 8, **POOLING},
    "config_sentence_transformers.json": {"__version__": {"sentence_transformers": "2.0.0"}},
    "sentence_bert_config.json": {"max_seq_length": LENGTH, "do_lower_case": False},
}  # fmt: skip


def tokenizer() -> Any:
    """A WordPiece tokenizer trained on the names of the classes."""
    trained = BertWordPieceTokenizer()
    trained.train_from_iterator(CLASSES, vocab_size=60, min_frequency=1, show_progress=False)
    marks = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    marks |= {"pad_token": "[PAD]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=trained._tokenizer, model_max_length=32, **marks
    )


def write_sentence_files(folder: Path, **changes: Any) -> None:
    """Write the files of sentence-transformers, with other contents for some."""
    for name, content in (FILES | changes).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


def bert() -> nn.Module:
    """A BERT for the tokenizer, which embeds texts."""
    config = BertConfig(
        vocab_size=len(tokenizer()), hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=12, max_position_embeddings=40,
    )  # fmt: skip
    torch.manual_seed(0)
    return scatter(BertModel(config), 0, 0.3)


def embeddings(model: Any, folder: Path, texts: list[str]) -> torch.Tensor:
    """Mean of each text's states, one text at a time, of norm 1."""
    encode, rows = AutoTokenizer.from_pretrained(folder), []
    for text in texts:
        ids = encode(text, truncation=True, max_length=LENGTH, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows.append(model.eval()(input_ids=ids).last_hidden_state[0].mean(dim=0))
    return F.normalize(torch.stack(rows), dim=-1)
