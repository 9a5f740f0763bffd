"""Verdicts of `featcal check` on twenty merges of tiny models, eight of which are damaged.

    OMP_NUM_THREADS=1 python benchmarks/check_merges.py

mergekit and PEFT merge in a temporary folder. Each damage changes one tensor, one token or the
precision of one tensor.
"""

import contextlib
import copy
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import transformers
import yaml
from click.testing import CliRunner
from mergekit.scripts import run_yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sides import machine
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from fusion_bench_featcal.folders.check import check_merge

WORDS = ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrst")
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **SIZES, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(
        **SIZES, n_embd=32, n_layer=3, n_head=4, n_positions=32)),
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(
        **SIZES, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=32)),
}  # fmt: skip
TARGETS = {"llama": ["q_proj", "down_proj"], "gpt2": ["c_attn"], "bert": ["query", "value"]}
MODULE = {
    "llama": "mlp.up_proj.weight", "gpt2": "mlp.c_fc.weight", "bert": "intermediate.dense.weight"
}  # fmt: skip


class Merge(NamedTuple):
    """One merge: its models, the dtype of their files, mergekit's config or "adapter", a damage."""

    kind: str
    stored: torch.dtype
    config: dict[str, Any] | None
    damage: str = ""


def scatter(model: nn.Module, seed: int, size: float) -> Any:
    """Return a copy of a model with noise on all parameters."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model


def tokenizer() -> Any:
    """Return a tokenizer with one token per word."""
    numbers = {word: number for number, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def make_models(kind: str, dtype: torch.dtype) -> None:
    """Write base, two experts near it, and an adapter."""
    torch.manual_seed(0)
    base = scatter(KINDS[kind](), 0, 0.05)
    for seed, name in enumerate(("base", "one", "two")):
        model = scatter(base, seed, 0.03 * bool(seed)).to(dtype)
        model.save_pretrained(name)
        tokenizer().save_pretrained(name)
    options = LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[kind])
    wrapped = get_peft_model(scatter(base, 0, 0.0), options)
    scatter_lora(wrapped)
    wrapped.save_pretrained("adapter")


def scatter_lora(model: nn.Module) -> None:
    """Give an adapter values other than zero."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def write_merge(merge: Merge) -> None:
    """Merge with mergekit, or with PEFT if there is no config."""
    if merge.config is None:
        base = type(KINDS[merge.kind]()).from_pretrained("base", dtype=merge.stored)
        merged = PeftModel.from_pretrained(base, "adapter").merge_and_unload()
        if merge.damage == "adapter not applied":
            merged = type(KINDS[merge.kind]()).from_pretrained("base", dtype=merge.stored)
        merged.save_pretrained("merged")
        tokenizer().save_pretrained("merged")
        return
    # mergekit keeps models in memory by their names, so these are full paths.
    text = yaml.safe_dump(merge.config).replace("./", f"{Path.cwd()}/")
    Path("config.yml").write_text(text)
    done = CliRunner().invoke(run_yaml.main, ["config.yml", "merged", "--quiet"])
    if done.exit_code:
        sys.exit(f"mergekit failed: {done.output} {done.exception}")


def change_tensor(kind: str, change: Callable[[str, Tensor], Tensor]) -> None:
    """Change one matrix of the merged model's file."""
    file = Path("merged/model.safetensors")
    if not file.exists():
        (file,) = Path("merged").glob("*.safetensors")
    tensors = load_file(file)
    name = sorted(name for name in tensors if name.endswith(MODULE[kind]))[1]
    tensors[name] = change(name, tensors[name]).contiguous()
    save_file(tensors, file, {"format": "pt"})


def noise(_name: str, tensor: Tensor) -> Tensor:
    """Return a tensor with noise of 1 % of its standard deviation."""
    generator = torch.Generator().manual_seed(9)
    values = tensor.float()
    return (values + 0.01 * values.std() * torch.randn(values.shape, generator=generator)).to(
        tensor
    )


def tensor_of_one(name: str, _tensor: Tensor) -> Tensor:
    """Return the tensor of the expert `one`."""
    with safe_open("one/model.safetensors", "pt") as file:
        return file.get_tensor(name)


def through(dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    """Return a change that rounds a tensor to another dtype and back."""
    return lambda _name, tensor: tensor.to(dtype).to(tensor)


def change_json(name: str, change: Callable[[Any], None]) -> None:
    """Change a JSON file of the merged model."""
    content = json.loads(Path("merged", name).read_text())
    change(content)
    Path("merged", name).write_text(json.dumps(content))


def swap_tokens(content: Any) -> None:
    """Exchange the ids of two tokens."""
    words = content["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]


DAMAGES: dict[str, Callable[[str], None]] = {
    "noise of 1 % on one tensor": lambda kind: change_tensor(kind, noise),
    "one tensor is that of expert one": lambda kind: change_tensor(kind, tensor_of_one),
    "one tensor through float8": lambda kind: change_tensor(kind, through(torch.float8_e4m3fn)),
    "one tensor through bfloat16": lambda kind: change_tensor(kind, through(torch.bfloat16)),
    "two tokens exchanged": lambda kind: change_json("tokenizer.json", swap_tokens),
    "another end token": lambda kind: change_json(
        "tokenizer_config.json", lambda content: content.update(eos_token="<unk>")
    ),
    "adapter not applied": lambda kind: None,
}  # fmt: skip


def config(method: str, dtype: str | None, *weights: Any, **more: Any) -> dict[str, Any]:
    """Return mergekit's config of the two experts."""
    models = [
        {"model": f"./{name}"} | ({"parameters": {"weight": weight}} if weights else {})
        for name, weight in zip(("one", "two"), weights or (None, None), strict=True)
    ]
    content = {"merge_method": method, "models": models} | ({"dtype": dtype} if dtype else {})
    return content | more


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TASKS: dict[str, Any] = {"base_model": "./base"}
SCALED = TASKS | {"parameters": {"lambda": 0.8}, "out_dtype": "float16"}
GRADIENT: dict[str, Any] = {"base_model": "./one", "parameters": {"t": [0.1, 0.5, 0.8]}}
FILTERED: dict[str, Any] = {"base_model": "./one", "parameters": {
    "t": [{"filter": "attn", "value": [0, 0.5, 1]}, {"filter": "mlp", "value": 0.3}, {"value": 0.6}]
}}  # fmt: skip
MERGES = [
    Merge("llama", F32, config("linear", "float32", 0.3, 0.9)),
    Merge("gpt2", BF16, config("linear", "bfloat16", 1.0, 1.0)),
    Merge("bert", F16, config("linear", "float16", 0.7, 0.5, parameters={"normalize": False})),
    Merge("llama", BF16, config("task_arithmetic", "bfloat16", 0.4, 0.7, **TASKS)),
    Merge("gpt2", F32, config("task_arithmetic", None, [0.2, 0.9], 0.5, **TASKS)),
    Merge("llama", F32, config("task_arithmetic", "bfloat16", 0.3, 0.3, **SCALED)),
    Merge("bert", F32, config("slerp", "float32", base_model="./one", parameters={"t": 0.4})),
    Merge("llama", F16, config("slerp", "float16", **FILTERED)),
    Merge("gpt2", BF16, config("slerp", "bfloat16", **GRADIENT)),
    Merge("llama", BF16, None),
    Merge("gpt2", F16, None),
    Merge("bert", F32, None),
    Merge("llama", F32, config("linear", "float32", 0.3, 0.9), "noise of 1 % on one tensor"),
    Merge("gpt2", BF16, config("task_arithmetic", "bfloat16", 0.4, 0.4, **TASKS),
          "one tensor is that of expert one"),
    Merge("llama", F16, config("slerp", "float16", **GRADIENT), "one tensor through bfloat16"),
    Merge("bert", F16, config("task_arithmetic", "float16", 0.5, 0.5, **TASKS),
          "one tensor through float8"),
    Merge("llama", BF16, config("linear", "bfloat16", 0.5, 0.5), "two tokens exchanged"),
    Merge("gpt2", F32, config("slerp", "float32", **GRADIENT), "another end token"),
    Merge("llama", BF16, None, "adapter not applied"),
    Merge("gpt2", F16, None, "noise of 1 % on one tensor"),
]  # fmt: skip


def check(merge: Merge) -> tuple[Sequence[str], bool]:
    """Make one merge in a new folder, damage it, and check it."""
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        make_models(merge.kind, merge.stored)
        write_merge(merge)
        DAMAGES.get(merge.damage, lambda kind: None)(merge.kind)
        options = ("base", {"a": "adapter"}) if merge.config is None else (None, {})
        return check_merge("merged", *options)


def main() -> None:
    """Print the table."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.logging.set_verbosity_error()
    rows, right = list[str](), 0
    for merge in MERGES:
        sentences, is_right = check(merge)
        is_as_expected = is_right == (not merge.damage)
        right += is_as_expected
        stored = str(merge.stored).removeprefix("torch.")
        how = "base + adapter (PEFT)"
        if merge.config is not None:
            types = [merge.config.get(key) for key in ("dtype", "out_dtype")]
            how = f"{merge.config['merge_method']} in {' to '.join(filter(None, types)) or stored}"
        row = f"{merge.kind} in {stored}, {how}", merge.damage or "none", "; ".join(sentences)
        rows.append(f"| {' | '.join(row)} | {'right' if is_as_expected else '**wrong**'} |")
    print(f"{right} of {len(MERGES)} verdicts are right. {machine()}\n")
    print("| Merge | Damage | `featcal check` says | Verdict |\n|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
