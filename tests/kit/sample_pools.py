"""Pools that are nothing but datasets, and the samples that a calibration draws from them."""

from types import SimpleNamespace
from typing import Any

import torch
from tiny_texts import WORDS, word_tokenizer
from transformers import CLIPImageProcessor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.data.text_limits import NO_LIMIT
from fusion_bench_featcal.fusionbench.data import calibration_batches

# A processor of transformers that only rescales.
RESCALE = CLIPImageProcessor(do_resize=False, do_center_crop=False, do_normalize=False)


class Pool:
    """As much of a model pool as calibration asks for."""

    def __init__(self, **tasks: Any) -> None:
        self.train_dataset_names = list(tasks)
        self.val_dataset_names = self.test_dataset_names = []
        self.load_train_dataset = tasks.__getitem__


# The kind of a pool of texts is recognised by the class's name.
TEXT_POOLS = {
    "seq2seq": type("Seq2SeqLMPool", (Pool,), {}),
    "causal": type("CausalLMPool", (Pool,), {}),
    "classification": type("SequenceClassificationModelPool", (Pool,), {}),
}


def batches_of(pool: Any, tasks: Any, processor: Any, **settings: Any) -> Any:
    """Batches that a calibration draws from a pool, by task."""
    models: Any = SimpleNamespace(positions=NO_LIMIT, ends=frozenset(), start=None)
    return calibration_batches(pool, tasks, FeatCalSettings(**settings), processor, models)


def image_batches(rows: Any, processor: Any = RESCALE, **settings: Any) -> Any:
    """Batches of task `a` with all rows, in random order."""
    return batches_of(Pool(a=rows), ["a"], processor, **{"samples_per_task": len(rows)} | settings)[
        "a"
    ]


def rgb(image: Any) -> list:
    """Pixels `[height, width, 3]` in 0..255 that a model sees of an image."""
    (batch,) = image_batches([{"image": image}])
    return (batch["pixel_values"][0] * 255).round().int().permute(1, 2, 0).tolist()


def text_batch(rows: Any, kind: str, tokenizer: Any = None, **settings: Any) -> Any:
    """One batch of all rows, in random order. Further options are settings."""
    tokenizer = tokenizer or word_tokenizer(ends=kind == "seq2seq")
    settings = dict.fromkeys(("samples_per_task", "batch_size"), len(rows)) | settings
    (batch,) = batches_of(TEXT_POOLS[kind](a=rows), ["a"], tokenizer, **settings)["a"]
    return batch


def three_texts(kind: str, *, left: bool = False) -> Any:
    """Three texts of unequal length, filled up on the left or right."""
    pairs = ("c d e f", "k"), ("g b", "l m"), ("h i j", "n")
    rows = [{"prompt": prompt, "target": target} for prompt, target in pairs]
    side = "left" if left else "right"
    tokenizer = word_tokenizer(ends=kind == "seq2seq", padding_side=side)
    return text_batch(rows, kind, tokenizer)


def words(ids: Any) -> str:
    """Tokens as words: `.` for the end mark, `?` for an unknown word, `_` for no target."""
    signs = {-100: "_", 1: ".", 2: "?"}
    return " ".join(signs.get(int(token), WORDS[max(int(token), 0)]) for token in ids)


def text_sample(row: Any, kind: str, tokenizer: Any = None, **settings: Any) -> str:
    """Words that a model reads of a row, and target words, as `a b c. > _ _ c .`."""
    batch = text_batch([row], kind, tokenizer, **settings)
    assert torch.equal(batch["attention_mask"], torch.ones_like(batch["input_ids"]))
    return " > ".join(words(batch[name][0]) for name in ("input_ids", "labels") if name in batch)
