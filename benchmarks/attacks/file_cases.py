"""Attacks by what a pool names: entries, weights, indexes and configs."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fusion_bench.modelpool import Seq2SeqLMPool
from safetensors.torch import load_file, save_file
from text_pools import text_pool
from tiny_texts import TASKS as TEXT_TASKS
from tiny_texts import sentences, t5_model, with_data, word_tokenizer, write

from attacks.judging import (
    REFUSED,
    RIGHT,
    captured_log,
    case,
    expect_warning,
)
from attacks.worlds import AVERAGE, World, calibrated
from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.pools import CausalLMPool

# --- entries and files of a pool ---


for _entry in (5, None, 2.5, True, ["a", "b"]):

    @case(f"files: model entry {_entry!r}", "one", r"modelpool\.models", must=REFUSED)
    def _(folder: Path, entry: Any = _entry) -> None:
        world = World(folder)
        world.modelpool["models"]["one"] = entry
        world.run()


for _entry in (5, None):

    @case(f"files: base entry {_entry!r}", "_pretrained_", r"modelpool\.models", must=REFUSED)
    def _(folder: Path, entry: Any = _entry) -> None:
        world = World(folder)
        world.modelpool["models"]["_pretrained_"] = entry
        world.run()


_DTYPES = {"fp8": torch.float8_e4m3fn, "complex": torch.complex64, "int8": torch.int8}
for _name, _dtype in _DTYPES.items():

    @case(f"files: expert with {_name} tensors", "one", "dtype|float8|fp8|complex|int8|F8|C64|I8",
          must=REFUSED)  # fmt: skip
    def _(folder: Path, dtype: torch.dtype = _dtype) -> None:
        world = World(folder)
        path = world.weights("one")
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
        world.run()


_INDEXES: Mapping[str, Any] = {
    "a number for a file": {"weight_map": {"a": 5}},
    "a number for the map": {"weight_map": 7},
    "a list": ["model-1.safetensors"],
    "null": None,
    "a path that leaves the folder": {"weight_map": {"a": "../../../etc/passwd"}},
}
for _name, _index in _INDEXES.items():

    @case(f"files: shard index with {_name}", r"index\.json|passwd", must=REFUSED)
    def _(folder: Path, index: Any = _index) -> None:
        world = World(folder)
        world.weights("one").unlink()
        (world.model("one") / "model.safetensors.index.json").write_text(json.dumps(index))
        world.run()


@case("files: expert without config.json", "one", r"config\.json")
def _(folder: Path) -> None:
    world = World(folder)
    (world.model("one") / "config.json").unlink()
    world.run(base_method={"_target_": "fusion_bench.method.TiesMergingAlgorithm",
                           "scaling_factor": 0.3, "threshold": 20, "remove_keys": [],
                           "merge_func": "sum"})  # fmt: skip


@case("files: an expert's file goes away meanwhile", "one", r"model\.safetensors|modelpool\.models")
def _(folder: Path) -> None:
    world = World(folder)
    world.modelpool["train_datasets"]["two"] = {
        "_target_": "attacks.parts.VanishingExpert",
        "path": str(world.data("two", "train")),
        "victim": str(world.weights("one")),
    }
    world.run()


@case("files: an expert's file that cannot be read", r"model\.safetensors", must=REFUSED,
      never=("no such file",))  # fmt: skip
def _(folder: Path) -> None:
    world = World(folder)
    world.weights("one").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        SafetensorsExpert(world.model("one"))
    finally:
        if root:
            os.seteuid(0)


@case("files: expert's config.json is damaged", "one", "config", must=REFUSED)
def _(folder: Path) -> None:
    world = World(folder)
    (world.model("one") / "config.json").write_text('{"vision_config": {"hidden_size": "si')
    world.run(base_method={"_target_": "fusion_bench.method.SimpleAverageAlgorithm"},
              stream_experts=False)  # fmt: skip


@case("files: the same expert twice", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    world.modelpool["models"]["two"] = world.modelpool["models"]["one"]
    with captured_log() as messages:
        world.run()
    expect_warning(messages, "one", "two", "same")


@case("files: the same expert twice, as a copy", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    shutil.copy(world.weights("one"), world.weights("two"))
    with captured_log() as messages:
        world.run()
    expect_warning(messages, "one", "two", "same")


@case("files: an expert that is the base", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    world.modelpool["models"]["two"] = world.modelpool["models"]["_pretrained_"]
    with captured_log() as messages:
        world.run()
    expect_warning(messages, "two", "base")


@case("files: causal pool without a tokenizer", "tokenizer", r"modelpool\.tokenizer", must=REFUSED)
def _(folder: Path) -> None:
    made = text_pool("causal", folder)
    paths = {name: str(folder / name.strip("_")) for name in ("_pretrained_", *TEXT_TASKS)}
    del made
    calibrated(with_data(CausalLMPool(paths, tokenizer=None)), base_method=AVERAGE)


@case("files: T5 pool given plain strings", r"modelpool\.models",
      never=("must be an existing folder",))  # fmt: skip
def _(folder: Path) -> None:
    paths: Any = {}
    for number, name in enumerate(("_pretrained_", *TEXT_TASKS)):
        paths[name] = write(t5_model(number).float(), folder / name)
    pool = Seq2SeqLMPool(paths, tokenizer=word_tokenizer(ends=True))
    calibrated(with_data(pool, sentences), base_method=AVERAGE)
