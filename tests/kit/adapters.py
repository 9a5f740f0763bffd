"""LoRA adapters of language models, written as PEFT does and merged by hand."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

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
    (folder / "adapter_config.json").write_text(json.dumps(PLAIN | changes))
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
