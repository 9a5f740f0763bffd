"""Tiny models of sentence-transformers: four kinds with random weights, and their texts."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentence_transformers as st
import torch
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn
from transformers import BertConfig, BertModel, BertTokenizer

from fusion_bench_featcal.sentence_transformers import repair

TASKS = ("math", "code")
NOUNS = ("lamp", "river", "stone", "cloud", "piano", "garden", "window", "rocket", "button")
WORDS = [*NOUNS, "of", "and", "query", "passage"]
WIDTH = 24


def backbone(folder: Path, kind: Any = BertModel, width: int = WIDTH) -> str:
    """Write a random BERT of two blocks, whose tokenizer has a few words."""
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]", ":"]
    numbers = {word: number for number, word in enumerate([*vocabulary, *WORDS])}
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(numbers), hidden_size=width, intermediate_size=2 * width,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        initializer_range=0.1,
    )  # fmt: skip
    kind(config).save_pretrained(folder)
    BertTokenizer(vocab=numbers, do_lower_case=False).save_pretrained(folder)
    return str(folder)


def sentence_model(plain: str, *behind: nn.Module, lower: bool = False, **options: Any) -> Any:
    transformer = Transformer(plain, do_lower_case=lower)
    modules = [transformer, Pooling(WIDTH, pooling_mode="mean"), *behind]
    return st.SentenceTransformer(modules=modules, device="cpu", **options)


def tuned(base: Any, seed: int, heads: Sequence[str] = ()) -> Any:
    """Return a copy whose blocks and named heads are moved by noise of rank 4."""
    model, random = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and (".encoder.layer." in name or name[:-7] in heads):
                left, right = (torch.randn(n, 4, generator=random) for n in parameter.shape)
                step = left @ right.T
                parameter += 0.2 * step / step.norm() * parameter.norm()
    return model.eval()


def texts_of(seed: int, count: int = 48) -> list[str]:
    random = torch.Generator().manual_seed(seed)
    words = WORDS[seed % 2 :: 2]
    lengths = torch.randint(2, 8, (count,), generator=random).tolist()
    return [
        " ".join(words[n] for n in torch.randint(len(words), (length,), generator=random))
        for length in lengths
    ]


def outputs(model: Any, rows: list[Any]) -> torch.Tensor:
    """Return what a user gets of rows, one vector for each."""
    if isinstance(model, st.CrossEncoder):
        return torch.as_tensor(model.predict(rows)).reshape(len(rows), -1)
    if isinstance(model, st.MultiVectorEncoder):
        both = model.encode_query(rows), model.encode_document(rows)
        return torch.cat([torch.stack([v.sum(0) for v in vectors]) for vectors in both], 1)
    vectors = model.encode(rows, convert_to_tensor=True)
    return vectors.to_dense() if vectors.is_sparse else vectors


def rows_of(model: Any, seed: int) -> list[Any]:
    if isinstance(model, st.CrossEncoder):
        return list(zip(texts_of(seed), texts_of(seed + 2), strict=True))
    return texts_of(seed)


def data_of(model: Any) -> dict[str, list[Any]]:
    return {task: rows_of(model, seed) for seed, task in enumerate(TASKS)}


def write_folders(folder: Path, base: Any) -> dict[str, Any]:
    """Write base, experts, merged model, and texts with labels or pairs."""
    experts = {task: tuned(base, seed) for seed, task in enumerate(TASKS, 1)}
    models = {"base": base, "merged": type(base).merge([*experts.values()], "linear"), **experts}
    for name, model in models.items():
        model.save_pretrained(str(folder / name))
    (folder / "merged" / "LICENSE").write_text("as you like")
    (folder / "merged" / "code.py").write_text("raise SystemExit('this code ran')")
    for task, rows in data_of(base).items():
        labelled = ({"text": row, "label": f"intent {n % 5}"} for n, row in enumerate(rows))
        pairs = ({"query": row[0], "document": row[1]} for row in rows)
        table = labelled if isinstance(rows[0], str) else pairs
        (folder / f"{task}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in table))
    return models


PROMPTS = {"query": "query : ", "document": "passage : "}
MAKERS: dict[str, tuple[Callable[[str, str], Any], bool]] = {
    # name -> makes the base from a BERT and a masked BERT, and whether the base is given
    "SentenceTransformer": (
        lambda plain, mlm: sentence_model(
            plain, Dense(WIDTH, 16), Normalize(),
            prompts=PROMPTS, default_prompt_name="query", similarity_fn_name="dot",
        ),
        True,
    ),
    "CrossEncoder": (
        lambda plain, mlm: st.CrossEncoder(
            plain, num_labels=1, activation_fn=nn.Identity(), max_length=20, device="cpu"
        ),
        True,
    ),
    "SparseEncoder": (lambda plain, mlm: st.SparseEncoder(mlm, device="cpu"), False),
    "MultiVectorEncoder": (
        lambda plain, mlm: st.MultiVectorEncoder(plain, prompts=PROMPTS, device="cpu"),
        False,
    ),
}  # fmt: skip


TEXTS = {task: texts_of(seed, 12) for seed, task in enumerate(TASKS)}


def repaired_by(encoders: Any, **changes: Any) -> Any:
    base, experts, merged = encoders
    arguments = {"base": base, "experts": experts, "texts": TEXTS, "progress": False} | changes
    return repair(arguments.pop("merged", merged), **arguments)


def equal(one: Any, other: Any) -> bool:
    """True if two models have the same bits."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def figure(evaluator: Any, model: Any, ending: str) -> float:
    """Return a figure of the library's evaluator, run by itself."""
    (value,) = {v for name, v in evaluator(model).items() if name.endswith(ending)}
    return value
