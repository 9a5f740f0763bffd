"""Calibrate a model that is larger than the memory available to `featcal calibrate`.

    python benchmarks/larger_than_memory.py FOLDER [--experts 2 8] [--blocks 4] [--kill]

Writes a random checkpoint of the shapes of Llama 3.1 8B (32 blocks, bfloat16, 16 GB) to FOLDER,
if it is not there, and calibrates it as base, merged model and experts, which are links to the same
shards. Prints the peak resident set and the seconds for each number of experts. Only the first
blocks are solved with `--solved`, all others are run. With `--kill` a second run is killed after
its first block and resumed, its files are compared with those of the first run, and plain
transformers loads them.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

SIZES = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336,
           "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256},
    "tiny": {"hidden_size": 256, "intermediate_size": 896,
             "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096},
}  # fmt: skip
GB = 1e9


def write_model(folder: Path, size: str, blocks: int) -> None:
    """Write a random Llama, one block in memory at a time, with a tokenizer of single letters."""
    shapes = SIZES[size] | {"num_hidden_layers": blocks}
    config = LlamaConfig(**shapes, max_position_embeddings=256, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    hidden, wide, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    few = hidden * config.num_key_value_heads // heads

    def matrix(rows: int, columns: int) -> torch.Tensor:
        scale = columns**-0.5
        return torch.randn(rows, columns, generator=generator, dtype=torch.bfloat16) * scale

    def norm() -> torch.Tensor:
        return torch.ones(hidden, dtype=torch.bfloat16)

    files: dict[str, str] = {}

    def shard(tensors: dict[str, torch.Tensor]) -> None:
        name = f"model-{len(set(files.values())):05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    shard({"model.embed_tokens.weight": matrix(config.vocab_size, hidden)})
    for index in range(config.num_hidden_layers):
        shapes = {
            "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (few, hidden),
            "self_attn.v_proj": (few, hidden), "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }  # fmt: skip
        block = f"model.layers.{index}"
        tensors = {f"{block}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        names = ("input_layernorm", "post_attention_layernorm")
        shard(tensors | {f"{block}.{name}.weight": norm() for name in names})
    shard({"model.norm.weight": norm(), "lm_head.weight": matrix(config.vocab_size, hidden)})
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token for each printable character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {chr(c): c - 29 for c in range(32, 127)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    AutoTokenizer.from_pretrained(folder)


def linked(source: Path, folder: Path) -> Path:
    """Return a folder with links to a model's files."""
    folder.mkdir(exist_ok=True)
    for file in source.iterdir():
        if not (folder / file.name).exists():
            os.link(file, folder / file.name)
    return folder


def command(folder: Path, model: Path, experts: int, options: argparse.Namespace) -> list[str]:
    """Return the words of a calibration with some experts, in a folder of links to the model."""
    folder.mkdir(exist_ok=True)
    words = [str(linked(model, folder / "merged")), "--base", str(linked(model, folder / "base"))]
    for number in range(experts):
        data = folder / f"task_{number}.jsonl"
        rows = [{"prompt": f"{number}{row} and ", "completion": "word"} for row in range(64)]
        data.write_text("\n".join(map(json.dumps, rows)) + "\n")
        expert = linked(model, folder / f"expert_{number}")
        words += ["--expert", f"e{number}={expert}", "--data", f"e{number}={data}"]
    settings = {"samples_per_task": options.samples, "ridge_lambda": 0.05, "batch_size": 2}
    if options.solved:
        settings["modules"] = [f"model.layers.{block}.*" for block in range(options.solved)]
    words += ["--preset", options.preset, "--no-eval"]
    words += [word for setting in options.set for word in ("--set", setting)]
    return [*words, *(w for n, v in settings.items() for w in ("--set", f"{n}={json.dumps(v)}"))]


def started(words: list[str], out: Path) -> subprocess.Popen[bytes]:
    """Start `featcal calibrate`."""
    program = "from fusion_bench_featcal.cli import main; raise SystemExit(main())"
    arguments = ["calibrate", *words, "--out", str(out)]
    return subprocess.Popen([sys.executable, "-c", program, *arguments])


def measured(words: list[str], out: Path) -> tuple[float, float]:
    """Run `featcal calibrate` and return its peak resident set in bytes, and its seconds."""
    start = time.perf_counter()
    _, status, used = os.wait4(started(words, out).pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(code)
    return used.ru_maxrss * 1024, time.perf_counter() - start


def killed_and_resumed(words: list[str], out: Path) -> None:
    """Kill a run after its first block, and let a second run finish it."""
    process = started(words, out)
    while process.poll() is None and not list(out.parent.glob(f"{out.name}.blocks/*.safetensors")):
        time.sleep(0.5)
    assert process.poll() is None, "the run ended before it could be killed"
    process.kill()
    process.wait()
    measured([*words, "--resume"], out)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, memory-mapped."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def check_resumed(words: list[str], out: Path) -> str:
    """Compare the files of an uninterrupted run with a run that was killed and resumed."""
    second = out.with_name("resumed")
    killed_and_resumed(words, second)
    first, other = tensors_of(out), tensors_of(second)
    is_equal = first.keys() == other.keys() and all(torch.equal(first[n], other[n]) for n in first)
    _, info = AutoModelForCausalLM.from_pretrained(second, output_loading_info=True)
    problems = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]
    bits = "the same bits" if is_equal else "OTHER BITS"
    fits = ", ".join(problems) or "all tensors fit"
    return f"killed after the first block and resumed: {bits}; loaded by transformers: {fits}"


def main() -> None:
    """Print a table of peak memory and seconds by the number of experts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--size", choices=SIZES, default="8b")
    parser.add_argument("--blocks", type=int, default=32, help="blocks of the model")
    parser.add_argument("--kill", action="store_true", help="kill a second run and resume it")
    parser.add_argument("--solved", type=int, default=0, help="blocks that are solved; 0: all")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--set", action="append", default=[], help="a further setting")
    options = parser.parse_args()
    model = options.folder / f"{options.size}-{options.blocks}"
    if not model.exists():
        write_model(model, options.size, options.blocks)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    folder, lines = options.folder / f"run-{model.name}", []
    for experts in options.experts:
        shutil.rmtree(folder, ignore_errors=True)
        words, out = command(folder, model, experts, options), folder / "out"
        peak, seconds = measured(words, out)
        lines += [f"| {experts} | {peak / GB:.2f} | {peak / size:.2f} | {seconds:.0f} |"]
    lines += ["", check_resumed(words, out)] if options.kill else []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    print(f"{model.name}: {size / GB:.1f} GB, blocks solved: {options.solved or 'all'}, "
          f"{options.samples} samples per task, preset {options.preset}\n")  # fmt: skip
    print("| experts | peak memory, GB | of the model's size | seconds |\n|--:|--:|--:|--:|")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
