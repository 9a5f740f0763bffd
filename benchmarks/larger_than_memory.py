"""Peak memory of `featcal calibrate` for models of several sizes and numbers of experts.

    python benchmarks/larger_than_memory.py FOLDER [--experts 2 8] [--blocks 4] [--set NAME=VALUE]

Writes a random checkpoint of the shapes of Llama 3.1 8B (32 blocks, bfloat16, 16 GB) to FOLDER,
if it is not there, and calibrates it as base, merged model and experts, which are links to the same
shards.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from sides import machine
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {"8b": (4096, 14336, 32, 8, 128256), "tiny": (256, 896, 8, 2, 4096)}
"""Name -> width, width of the MLP, heads, key-value heads, vocabulary."""

GB = 1e9


def write_model(folder: Path, size: str, blocks: int) -> None:
    """Write a random Llama, with one block in memory at a time, and a tokenizer of letters."""
    width, inner, heads, kv_heads, vocabulary = SIZES[size]
    config = LlamaConfig(
        hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, num_hidden_layers=blocks,
        max_position_embeddings=256, dtype="bfloat16", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {n: p.shape for n, p in LlamaForCausalLM(config).named_parameters()}
    shards: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        block = name.removeprefix("model.layers.").partition(".")[0]
        shards.setdefault(f"model-{block}.safetensors", {})[name] = shape
    for shard, names in shards.items():
        tensors = {name: random_tensor(shape) for name, shape in names.items()}
        save_file(tensors, folder / shard, {"format": "pt"})
    files = {name: shard for shard, names in shards.items() for name in names}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    tokens = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(code): code - 29 for code in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def random_tensor(shape: torch.Size) -> Tensor:
    """Return a matrix that keeps the scale of its input, or the gain of a norm."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.randn(shape, dtype=torch.bfloat16) * shape[1] ** -0.5


def linked(source: Path, folder: Path) -> str:
    """Return a folder with hard links to a model's files."""
    folder.mkdir(parents=True)
    for file in source.iterdir():
        os.link(file, folder / file.name)
    return str(folder)


def command(folder: Path, model: Path, experts: int, settings: list[str]) -> list[str]:
    """Return the words of a calibration with some experts."""
    words = [linked(model, folder / "merged"), "--base", linked(model, folder / "base")]
    for number in range(experts):
        data = folder / f"task_{number}.jsonl"
        rows = [{"prompt": f"{number}{row} and ", "completion": "word"} for row in range(64)]
        data.write_text("\n".join(map(json.dumps, rows)) + "\n")
        expert = linked(model, folder / f"expert_{number}")
        words += ["--expert", f"e{number}={expert}", "--data", f"e{number}={data}"]
    words += [word for setting in settings for word in ("--set", setting)]
    return [*words, "--preset", "paper", "--no-eval", "--out", str(folder / "out")]


def measured(words: list[str]) -> tuple[float, float]:
    """Run `featcal calibrate` and return its peak resident memory in bytes, and CPU seconds."""
    program = "from fusion_bench_featcal.cli import main; raise SystemExit(main())"
    process = subprocess.Popen([sys.executable, "-c", program, "calibrate", *words])
    _, status, used = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        sys.exit(code)
    return used.ru_maxrss * 1024, used.ru_utime + used.ru_stime


def main() -> None:
    """Print a table of peak memory and CPU seconds by the number of experts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], help="a further setting")
    options = parser.parse_args()
    model = options.folder / f"{options.size}-{options.blocks}"
    if not model.exists():
        write_model(model, options.size, options.blocks)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    settings = ["samples_per_task=2", "ridge_lambda=0.05", "batch_size=2", *options.set]
    print(f"{model.name}: {size / GB:.1f} GB, the paper's rule, {settings}. {machine()}\n")
    print("| experts | peak memory, GB | of the model's size | CPU seconds |\n|--:|--:|--:|--:|")
    for experts in options.experts:
        folder = options.folder / f"run-{model.name}"
        shutil.rmtree(folder, ignore_errors=True)
        peak, seconds = measured(command(folder, model, experts, settings))
        cells = f"{peak / GB:.2f} | {peak / size:.2f} | {seconds:.0f}"
        print(f"| {experts} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
