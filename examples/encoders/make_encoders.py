"""Train small encoders for the tutorial of sentence-transformers.

    python make_encoders.py embedders DIR   embedding models
    python make_encoders.py rerankers DIR   rerankers

Each writes `banking` and `home`, fine-tuned from `base`, and pairs of a query and the name of its
intent: `banking.jsonl`, on which no model was trained, and `banking_test.jsonl`. `work_test.jsonl`
has a task that no model was trained on.
"""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from torch.nn import functional as F
from transformers import BertConfig, BertModel, BertTokenizer

from fusion_bench_featcal.suites import load_text_split

TASKS = {"banking": "banking77", "home": "clinc_home"}
OTHER = ("work", "clinc_work")
WIDTH, BATCH = 64, 32

Pairs = list[tuple[str, str]]
Loss = Callable[[Any, Pairs, torch.Generator], Tensor]


def pairs_of(task: str, split: str) -> Pairs:
    """Return texts with the name of their intent."""
    rows = load_text_split(task, split, "classes")
    names = rows.features["label"].names
    return [(row["text"], names[row["label"]].replace("_", " ")) for row in rows]


def write_backbone(folder: Path, texts: list[str]) -> None:
    """Write an untrained BERT whose tokens are the words of some texts."""
    words = sorted({word for text in texts for word in re.findall(r"\w+|[^\w\s]", text.lower())})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizer(vocab={word: n for n, word in enumerate(vocabulary)}).save_pretrained(folder)


def nearest_loss(model: Any, pairs: Pairs, random: torch.Generator) -> Tensor:
    """Return the loss of finding each query's intent among all intents."""
    names = sorted({name for _, name in pairs})
    chosen = [pairs[n] for n in torch.randperm(len(pairs), generator=random)[:BATCH]]
    vectors = model(model.preprocess([*(text for text, _ in chosen), *names]))["sentence_embedding"]
    scores = vectors[: len(chosen)] @ vectors[len(chosen) :].T / 0.05
    return F.cross_entropy(scores, torch.tensor([names.index(name) for _, name in chosen]))


def pair_loss(model: Any, pairs: Pairs, random: torch.Generator) -> Tensor:
    """Return the loss of telling a query's intent from another one."""
    order = torch.randperm(len(pairs), generator=random)[: 2 * BATCH].tolist()
    chosen = [pairs[n] for n in order[:BATCH]]
    others = [name for _, name in (pairs[n] for n in order[BATCH:])]
    wrong = [(text, other) for (text, _), other in zip(chosen, others, strict=True)]
    labels = torch.tensor([float(pair in pairs) for pair in (*chosen, *wrong)])
    scores = model(model.preprocess([*chosen, *wrong]))["scores"].squeeze(-1)
    return F.binary_cross_entropy_with_logits(scores, labels)


def tuned(model: Any, pairs: Pairs, steps: int, rate: float, loss_of: Loss) -> Any:
    """Return a trained copy of a model."""
    model, random = copy.deepcopy(model).train(), torch.Generator().manual_seed(0)
    optimizer, loss = torch.optim.AdamW(model.parameters(), rate), torch.zeros(())
    for _ in range(steps):
        loss = loss_of(model, pairs, random)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{type(model).__name__}, {steps} steps: loss {loss.item():.2f}", flush=True)
    return model.eval()


def main(kind: str, folder: Path) -> None:
    """Write texts and models into a new folder."""
    torch.manual_seed(0)
    train = {name: pairs_of(task, "train") for name, task in TASKS.items()}
    files = {name: (task, "calibration") for name, task in TASKS.items()}
    files |= {f"{name}_test": (task, "test") for name, task in (*TASKS.items(), OTHER)}
    for name, (task, split) in files.items():
        lines = [json.dumps({"query": a, "document": b}) for a, b in pairs_of(task, split)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    together = [pair for pairs in train.values() for pair in pairs]
    write_backbone(folder / "bert", [text for pair in together for text in pair])
    modules = [Transformer(str(folder / "bert")), Pooling(WIDTH), Normalize()]
    untrained = SentenceTransformer(modules=modules, device="cpu")
    base = tuned(untrained, together, 20, 1e-3, nearest_loss)
    base.save_pretrained(str(folder / "base"))
    if kind == "rerankers":
        untrained = CrossEncoder(str(folder / "base"), num_labels=1, device="cpu")
        base = tuned(untrained, together, 60, 5e-4, pair_loss)
        base.save_pretrained(str(folder / "base"))
    training = (200, 1e-3, nearest_loss) if kind == "embedders" else (150, 5e-4, pair_loss)
    for name, pairs in train.items():
        tuned(base, pairs, *training).save_pretrained(str(folder / name))


if __name__ == "__main__":
    kinds = ("embedders", "rerankers")
    if len(sys.argv) != 3 or sys.argv[1] not in kinds or Path(sys.argv[2]).exists():
        sys.exit("usage: make_encoders.py embedders|rerankers FOLDER (that does not exist yet)")
    Path(sys.argv[2]).mkdir(parents=True)
    main(sys.argv[1], Path(sys.argv[2]))
    print(f"wrote {sys.argv[2]}")
