"""A tokenizer of a few words, tiny language models that speak it, their pools and adapters."""

import json
from pathlib import Path
from typing import Any

import tiny_models
import torch
from fusion_bench.modelpool import Seq2SeqLMPool
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny_models import scatter
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import PreTrainedTokenizerFast

from fusion_bench_featcal.pools import CausalLMPool

WORDS = ("<pad>", "</s>", "<unk>", *"abcdefghijklmnopqrst")
TASKS = ("one", "two")
NAMES = ("_pretrained_", *TASKS)


def word_tokenizer(*, ends: bool = False, words: tuple[str, ...] = WORDS, **options: Any) -> Any:
    """One token a word. With `ends` every text ends in `</s>`, as T5's do."""
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="$A </s>", special_tokens=[("</s>", 1)]
        )
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(special | options))


def t5_model(seed: int = 0) -> nn.Module:
    """A gated T5 of two blocks a side, whose head is a separate matrix."""
    model = tiny_models.t5_model(
        untied=True, seed=seed, vocab_size=len(WORDS), d_kv=4, d_ff=12, tie_word_embeddings=False
    )
    return scatter(model, seed, 0.05)


def llama_model(seed: int = 0, rows: int = len(WORDS)) -> nn.Module:
    """A Llama of two blocks with grouped heads."""
    model = tiny_models.model_of(
        seed=seed, vocab_size=rows, hidden_size=8, intermediate_size=12, num_attention_heads=2,
        num_key_value_heads=1, bos_token_id=2, eos_token_id=1,
    )  # fmt: skip
    return scatter(model, seed, 0.05)


def mixture_model(seed: int = 0) -> nn.Module:
    """A Qwen3-MoE of two blocks with four slots each."""
    return scatter(tiny_models.model_of("qwen3_moe", seed, vocab_size=len(WORDS)), seed, 0.05)


def sentences(task: str, number: int = 12) -> list[dict[str, str]]:
    """Prompts of unequal length with answers of one or two words."""
    letters = WORDS[3:]
    start = 7 * TASKS.index(task)
    return [
        {
            "prompt": " ".join(letters[(start + n * k) % 20] for k in range(1, 3 + n % 5)),
            "target": " ".join(letters[(start + n) % 20] for _ in range(1 + n % 2)),
        }
        for n in range(number)
    ]


def write(model: Any, folder: Path, tokenizer: Any = None) -> str:
    """Save a model, and a tokenizer beside it."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def load_t5(paths: dict[str, str]) -> dict[str, dict[str, str]]:
    """Entries of a pool that load T5s."""
    target = "transformers.AutoModelForSeq2SeqLM.from_pretrained"
    return {n: {"_target_": target, "pretrained_model_name_or_path": p} for n, p in paths.items()}


def with_data(pool: Any, rows: Any = sentences) -> Any:
    """Give a pool the two tasks' texts as training data."""
    pool._train_datasets = {task: {} for task in TASKS}
    pool.load_train_dataset = rows
    return pool


# --- pools ---

MAKERS: dict[str, Any] = {"seq2seq": t5_model, "causal": llama_model}


def text_tokenizer(kind: str) -> Any:
    return word_tokenizer(ends=kind == "seq2seq")


def llamas(folder: Path, rows: dict[str, int]) -> dict[str, str]:
    """A base and two experts. Experts may have more rows of embeddings than there are words."""
    return {
        name: write(llama_model(n, rows.get(name, len(WORDS))).float(), folder / name.strip("_"))
        for n, name in enumerate(NAMES)
    }


def causal_pool(models: dict[str, str], kind: Any = CausalLMPool, **options: Any) -> Any:
    return with_data(kind(OmegaConf.create(models), tokenizer=word_tokenizer(), **options))


def t5_pool(folder: Path) -> Any:
    models = {n: write(t5_model(k).float(), folder / n.strip("_")) for k, n in enumerate(NAMES)}
    tokenizer = text_tokenizer("seq2seq")
    return with_data(Seq2SeqLMPool(OmegaConf.create(load_t5(models)), tokenizer=tokenizer))


def text_pool(kind: str, folder: Path) -> Any:
    """A base and two experts on disk."""
    if kind == "mixture":
        mixtures = {n: mixture_model(k).float() for k, n in enumerate(NAMES)}
        pool = causal_pool({n: write(m, folder / n.strip("_")) for n, m in mixtures.items()})
    else:
        pool = causal_pool(llamas(folder, {})) if kind == "causal" else t5_pool(folder)
    return with_tests(pool, sentences)


def with_tests(pool: Any, tests: Any) -> Any:
    """Give a pool the two tasks' texts as test data."""
    pool._test_datasets = {task: {} for task in TASKS}
    pool.load_test_dataset = tests
    return pool


# --- LoRA adapters, written as PEFT does ---

PLAIN = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", "init_lora_weights": True}
ADAPTED = ("SelfAttention.q", "EncDecAttention.v", "DenseReluDense.wo")
ADAPTED += ("q_proj", "down_proj", "query")


def write_adapter(folder: Path, base: nn.Module, seed: int, **changes: Any) -> Path:
    """An adapter of rank 2 for some of a T5's, Llama's or BERT's linear modules."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in base.named_modules():
        if name.endswith(ADAPTED) and isinstance(module, nn.Linear):
            start = f"base_model.model.{name}.lora_"
            down = torch.randn(2, module.in_features, generator=generator)
            up = torch.randn(module.out_features, 2, generator=generator)
            tensors |= {f"{start}A.weight": down, f"{start}B.weight": 0.1 * up}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = {end for end in ADAPTED if any(f".{end}.lora_A" in name for name in tensors)}
    config = PLAIN | {"target_modules": sorted(targets)} | changes
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_by_hand(base: nn.Module, adapter: Path, scale: float) -> nn.Module:
    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in base.named_modules():
            up = tensors.get(f"base_model.model.{name}.lora_B.weight")
            if up is not None:
                down = tensors[f"base_model.model.{name}.lora_A.weight"]
                module.weight += scale * (up @ down)  # type: ignore[operator]
    return base
