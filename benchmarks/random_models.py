"""Models with random weights in the shapes of published ones, their experts, and inputs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    MPNetConfig,
    MPNetModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

BATCH, TOKENS, TARGETS, VOCABULARY = 16, 128, 8, 1000
SENTENCE, SOUND = 16, 250  # tokens of a short text, positions of five seconds
SLOTS, SLOTS_PER_TOKEN = 32, 4
WIDTHS = {
    "vit-b-32": (768, 3072, 12, 32),
    "vit-l-14": (1024, 4096, 16, 14),
    "t5-base": (768, 2048, 12, 0),
    "mpnet": (768, 3072, 12, 0),
    "whisper-base": (512, 2048, 8, 0),
    "llama-narrow": (768, 2048, 12, 4),
    "llama-small": (1024, 3584, 16, 4),
    "llama-1b": (2048, 8192, 32, 8),
    "llama-3b": (3072, 8192, 24, 8),
    "llama-8b": (4096, 14336, 32, 8),
    "llama-70b": (8192, 28672, 64, 8),
    "qwen3-small": (1024, 4096, 16, 4),
    "qwen3moe-small": (1024, 4096, 16, 4),
}
"""Name -> width, width of the MLP, heads, and size of a patch or number of key-value heads."""


def build(name: str, layers: int) -> Any:
    """Return a model with the random weights of its constructor."""
    width, inner, heads, last = WIDTHS[name]
    torch.manual_seed(0)
    if name.startswith("t5"):
        config = T5Config(
            vocab_size=VOCABULARY, d_model=width, d_ff=inner, d_kv=width // heads, num_heads=heads,
            num_layers=layers, feed_forward_proj="gated-gelu", decoder_start_token_id=0,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).eval()
    if name.startswith("whisper"):
        config = WhisperConfig(
            vocab_size=VOCABULARY, d_model=width, encoder_layers=layers, decoder_layers=layers,
            encoder_ffn_dim=inner, decoder_ffn_dim=inner, encoder_attention_heads=heads,
            decoder_attention_heads=heads, max_source_positions=SOUND, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, begin_suppress_tokens=None,
        )  # fmt: skip
        return WhisperForConditionalGeneration(config).eval()
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    if name.startswith("vit"):
        return CLIPVisionModel(CLIPVisionConfig(patch_size=last, **sizes)).eval()
    if name == "mpnet":
        return MPNetModel(MPNetConfig(vocab_size=VOCABULARY, **sizes)).eval()
    sizes |= {"num_key_value_heads": last, "vocab_size": VOCABULARY, "tie_word_embeddings": True}
    if name.startswith("qwen3moe"):  # the weights of the dense one, in routed experts
        routed = {"moe_intermediate_size": inner // SLOTS, "num_experts": SLOTS}
        routed |= {"num_experts_per_tok": SLOTS_PER_TOKEN, "head_dim": width // heads}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **routed)).eval()
    if name.startswith("qwen3"):
        return Qwen3ForCausalLM(Qwen3Config(head_dim=width // heads, **sizes)).eval()
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=1024, **sizes)).eval()


def write_models(folder: Path, name: str, layers: int, tasks: int) -> None:
    """Write `base`, `task_0` ..., and `merged`, their task arithmetic with scale 0.3."""
    model = build(name, layers)
    base = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    merged = {name: tensor.clone() for name, tensor in base.items()}
    _write(base, folder / "base")
    for index in range(tasks):
        steps = {name: 0.01 * torch.randn_like(tensor) for name, tensor in base.items()}
        _write({name: base[name] + step for name, step in steps.items()}, folder / f"task_{index}")
        for name, step in steps.items():
            merged[name] += 0.3 * step
    _write(merged, folder / "merged")


def _write(tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, name: str, layers: int) -> Any:
    """Return a stored model in allocated memory, since mapped files would hide its size."""
    model = build(name, layers)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return model


def batches(
    name: str, task: int, samples: int, length: int | None = None
) -> Iterator[dict[str, Tensor]]:
    """Yield a task's random images, sounds with texts, or texts without padding."""
    generator = torch.Generator().manual_seed(task)
    length = length or (SENTENCE if name == "mpnet" else TOKENS)
    for start in range(0, samples, BATCH):
        size = min(BATCH, samples - start)
        if name.startswith("vit"):
            yield {"pixel_values": torch.randn(size, 3, 224, 224, generator=generator)}
            continue
        if name.startswith("whisper"):
            sounds = torch.randn(size, 80, 2 * SOUND, generator=generator)
            labels = torch.randint(3, VOCABULARY, (size, SENTENCE), generator=generator)
            yield {"input_features": sounds, "labels": labels}
            continue
        ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if name.startswith("t5"):
            batch["labels"] = torch.randint(VOCABULARY, (size, TARGETS), generator=generator)
        yield batch
