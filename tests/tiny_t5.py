"""Tiny T5 models whose sentences and targets have unequal lengths."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from calibrations import PAPER
from oracle import Knobs, Outcome, calibrate_slowly
from tiny_models import Suite, modules_of, suite_of
from torch import Tensor, nn
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

# T5LayerNorm takes its variance, and eager attention its softmax, in float32 whatever the model's
# dtype: two orders of the same float64 sums agree no better than that
ROUNDING = 2e-6

KINDS: dict[str, tuple[type, type]] = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}
REPLAY: dict[str, Any] = {
    "name": "replay",
    "blocks": [["encoder.block.*"], ["decoder.block.*"]],
    "mask": ["attention_mask", "labels"],
    "other_masks": {"EncDecAttention.[kv]": "attention_mask"},
}


def t5_model(
    kind: str = "t5",
    *,
    gated: bool = True,
    untied: bool = False,
    depths: tuple[int, int] = (2, 2),
    width: int = 8,
    heads: int = 2,
    seed: int = 0,
) -> nn.Module:
    """Random model; `untied` gives the head weights of its own, as FLAN-T5's checkpoints do."""
    torch.manual_seed(seed)
    config_class, model_class = KINDS[kind]
    config = config_class(
        vocab_size=30,
        d_model=width,
        d_kv=3,
        d_ff=10,
        num_layers=depths[0],
        num_decoder_layers=depths[1],
        num_heads=heads,
        feed_forward_proj="gated-gelu" if gated else "relu",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=0,
    )
    model = model_class(config).eval()
    if untied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def t5_batch(
    lengths: Sequence[int], targets: Sequence[int], seed: int, *, pad: tuple[int, int] = (0, 0)
) -> dict[str, Tensor]:
    """Sentences and labels of given lengths, filled up on the right by at least `pad` more."""
    generator = torch.Generator().manual_seed(seed)

    def filled(sizes: Sequence[int], extra: int, fill: int) -> Tensor:
        table = torch.full((len(sizes), max(sizes) + extra), fill)
        for row, size in enumerate(sizes):
            table[row, :size] = torch.randint(2, 30, (size,), generator=generator)
        return table

    ids, labels = filled(lengths, pad[0], 0), filled(targets, pad[1], -100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


def t5_suite(*, tasks: int = 2, seed: int = 0, **shape: Any) -> Suite:
    """Tiny T5 suite in float64, with two batches a task."""
    model = t5_model(seed=seed, **shape)
    inputs = {}
    for index in range(tasks):
        start = 100 * seed + 10 * index
        first = t5_batch([3, 6, 5], [4, 1, 3], start, pad=(1, 0))
        inputs[f"task_{index}"] = [first, t5_batch([5, 2, 4, 4], [2, 3, 1, 2], start + 1)]
    blocks = [f"encoder.block.{i}" for i in range(len(model.get_submodule("encoder.block")))]  # pyright: ignore[reportArgumentType]
    blocks += [f"decoder.block.{i}" for i in range(len(model.get_submodule("decoder.block")))]  # pyright: ignore[reportArgumentType]
    return suite_of(model, inputs, blocks, seed)


def decoder_masks(suite: Suite, decoder_rows: str = "all") -> dict[str, list[Tensor]]:
    def rows(batch: Mapping[str, Tensor]) -> Tensor:
        mask = batch.get("decoder_attention_mask")
        return mask if mask is not None and decoder_rows == "all" else batch["labels"] >= 0

    return {task: [rows(batch) for batch in batches] for task, batches in suite.inputs.items()}


def run_slow_t5(
    suite: Suite,
    knobs: Knobs = PAPER,
    decoder_rows: str = "all",
    features: torch.dtype = torch.float64,
) -> Outcome:
    """The oracle, told which rows every block and module of T5 sees."""
    encoder = {t: [b["attention_mask"] for b in batches] for t, batches in suite.inputs.items()}
    decoder = decoder_masks(suite, decoder_rows)
    modules = modules_of(suite.merged, suite.blocks)
    others: dict[str, Any] = {name: decoder for name in suite.blocks if name.startswith("decoder")}
    for name in (name for names in modules.values() for name in names):
        if name.endswith(("EncDecAttention.k", "EncDecAttention.v")):
            others[name] = encoder
    models = (suite.merged, suite.base, suite.experts)
    names = (suite.inputs, suite.blocks, modules, knobs, encoder, others)
    return calibrate_slowly(*models, *names, features=features)
