"""Random tiny models of every family, the same on every machine and under every transformers."""

import copy
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, CLIPVisionConfig
from transformers import AutoModelForSeq2SeqLM as AutoSeq2Seq
from transformers import CLIPVisionModel as ClipTower

TASKS = ("first", "second", "third")
NO_TARGET = -100
WORDS = 30


@dataclass
class Suite:
    """Arguments of one calibration; every number in it is representable in float32."""

    merged: nn.Module
    base: nn.Module
    experts: dict[str, nn.Module]
    batches: dict[str, list[Any]]
    family: Any = "auto"

    @property
    def samples(self) -> int:
        """Samples of each task."""
        first = next(iter(self.batches.values()))
        return sum(len(next(iter(b.values())) if isinstance(b, Mapping) else b) for b in first)

    def to(self, dtype: torch.dtype) -> "Suite":
        """Copies of models and inputs in another dtype."""
        return Suite(
            copy.deepcopy(self.merged).to(dtype),
            copy.deepcopy(self.base).to(dtype),
            {task: copy.deepcopy(expert).to(dtype) for task, expert in self.experts.items()},
            {task: [_cast(b, dtype) for b in batches] for task, batches in self.batches.items()},
            self.family,
        )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Mapping):
        return {key: _cast(part, dtype) for key, part in value.items()}
    return value.to(dtype) if value.is_floating_point() else value


def stable_name(name: str) -> str:
    """Name of a parameter whatever the release: transformers 5.6 dropped this prefix of CLIP's."""
    return name.removeprefix("vision_model.")


def noise(seed: str, shape: Sequence[int]) -> Tensor:
    """Normal numbers in float64 that depend on the text alone.

    Drawn in float64, whose draw has one implementation, and rounded to float32's grid.
    """
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).float().double()


def _initial(name: str, shape: Sequence[int], seed: str) -> Tensor:
    drawn = noise(f"{seed} {stable_name(name)}", shape)
    if len(shape) > 1:
        return drawn / drawn[0].numel() ** 0.5
    return 1 + 0.15 * drawn if name.endswith("weight") else 0.2 * drawn


@torch.no_grad()
def _filled(model: nn.Module, value: Callable[[str, Tensor], Tensor]) -> nn.Module:
    filled = copy.deepcopy(model).double().eval()
    for name, parameter in filled.named_parameters():
        parameter.copy_(value(name, parameter).float())
    return filled


def suite_of(
    model: nn.Module, batches: Mapping[str, list[Any]], family: Any = "auto", seed: str = ""
) -> Suite:
    """Base, experts scattered about it and their task arithmetic, in float64."""
    base = _filled(model, lambda name, p: _initial(name, p.shape, seed))

    def scattered(task: str) -> Callable[[str, Tensor], Tensor]:
        def value(name: str, p: Tensor) -> Tensor:
            step = noise(f"{seed} {task} {stable_name(name)}", p.shape)
            return p + 0.5 * step / max(p.shape) ** 0.5 / p.dim()

        return value

    experts = {task: _filled(base, scattered(task)) for task in batches}
    values = [dict(expert.named_parameters()) for expert in experts.values()]
    merged = _filled(base, lambda name, p: p + 0.4 * sum(their[name] - p for their in values))
    return Suite(merged, base, experts, dict(batches), family)


def _images(sizes: Sequence[int] = (4, 3)) -> dict[str, list[Tensor]]:
    return {
        task: [(n + 1) / 2 * noise(f"images {task} {i}", (size, 3, 8, 8)) for i, size in sizes_of]
        for n, task in enumerate(TASKS)
        for sizes_of in [list(enumerate(sizes))]
    }


def clip_suite(hidden_act: str = "quick_gelu") -> Suite:
    """CLIP's vision tower: five tokens an image."""
    config = CLIPVisionConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        image_size=8,
        patch_size=4,
        hidden_act=hidden_act,
    )
    batches = {task: [{"pixel_values": b} for b in parts] for task, parts in _images().items()}
    return suite_of(ClipTower(config), batches)


class _OpenClipBlock(nn.Module):
    """Attention and MLP after a norm each, under open_clip's names."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        up, down = nn.Linear(width, 20), nn.Linear(20, width)
        self.mlp = nn.Sequential(OrderedDict(c_fc=up, gelu=nn.GELU(), c_proj=down))

    def forward(self, q_x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        x = self.ln_1(q_x)
        x = q_x + self.attn(x, x, x, need_weights=False, attn_mask=attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class _Blocks(nn.Module):
    """A chain of blocks, batch first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.batch_first = True
        self.resblocks = nn.ModuleList(_OpenClipBlock(width, heads) for _ in range(2))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, attn_mask=attn_mask)
        return x


class OpenClipTower(nn.Module):
    """A vision tower as open_clip cuts it, made of torch's parts."""

    def __init__(self, width: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 4, 4, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(4, width))
        self.transformer = _Blocks(width, heads)
        self.ln_post = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv1(x).flatten(2).transpose(1, 2) + self.positional_embedding
        return self.ln_post(self.transformer(tokens)).mean(dim=1)


class _ResidualBlock(nn.Module):
    """Pre-norm block whose second linear has no bias."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class ResidualNet(nn.Module):
    """Residual blocks on plain `[samples, features]` tensors."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(_ResidualBlock(width, 9) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def residual_suite() -> Suite:
    """Calibrated by replay."""
    batches = {task: [noise(f"{task} {n}", (n, 4)) + 1 for n in (9, 6)] for task in TASKS[:2]}
    return suite_of(ResidualNet(), batches, {"name": "replay", "blocks": ["layers.*"]})


def _sentences(seed: str, lengths: Sequence[int], fill: int = 0, extra: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    ids = torch.full((len(lengths), max(lengths) + extra), fill)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, WORDS, (length,), generator=generator)
    return ids


def _batch(seed: str, lengths: Sequence[int], targets: Sequence[int] = ()) -> dict[str, Tensor]:
    """Padded sentences; labels are of their own with `targets`, else each sentence's last third."""
    ids = _sentences(seed, lengths, extra=1 if targets else 0)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    if targets:
        return batch | {"labels": _sentences(f"{seed} labels", targets, NO_TARGET, 0)}
    labels = torch.full_like(ids, NO_TARGET)
    for row, length in enumerate(lengths):
        start = length - max(1, length // 3)
        labels[row, start:length] = ids[row, start:length]
    return batch | {"labels": labels}


SHARED: dict[str, Any] = {
    "vocab_size": WORDS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER = SHARED | {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
DECODERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 3},
    "qwen3": MIXED | {"sliding_window": 2, "use_sliding_window": True, "head_dim": 6},
    "gemma2": MIXED | {"sliding_window": 5, "head_dim": 6, "query_pre_attn_scalar": 6},
    "phi3": {"sliding_window": 3},
}


def decoder_suite(kind: str) -> Suite:
    """A causal language model of grouped heads."""
    config = AutoConfig.for_model(kind, **(DECODER | DECODERS[kind]))
    batches = {
        task: [_batch(f"{task} 0", [5, 9, 7]), _batch(f"{task} 1", [6, 3, 4, 6])]
        for task in TASKS[:2]
    }
    # Gemma 2 caps attention, which sdpa cannot: releases differ in whether they choose it.
    attention = "eager" if kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return suite_of(model, batches)


def t5_suite(kind: str = "t5") -> Suite:
    """An encoder-decoder model, sentences and targets of unequal length."""
    config = AutoConfig.for_model(
        kind,
        **SHARED,
        d_model=8,
        d_kv=3,
        d_ff=10,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8,
        relative_attention_max_distance=10,
        decoder_start_token_id=0,
    )
    batches = {
        task: [
            _batch(f"{task} 0", [3, 6, 5], [4, 1, 3]),
            _batch(f"{task} 1", [5, 2, 4, 4], [2, 3, 1, 2]),
        ]
        for task in TASKS[:2]
    }
    return suite_of(AutoSeq2Seq.from_config(config), batches)


def gpt2_suite() -> Suite:
    """GPT-2, whose linear modules are Conv1D, calibrated by replay."""
    config = AutoConfig.for_model("gpt2", **SHARED, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    batches = {
        task: [_batch(f"{task} 0", [2, 5, 3]), _batch(f"{task} 1", [4, 1, 5, 2])]
        for task in TASKS[:2]
    }
    for parts in batches.values():
        for batch in parts:
            del batch["labels"]
    family = {"name": "replay", "blocks": ["h.*"]}
    return suite_of(AutoModel.from_config(config), batches, family)


MAKERS: dict[str, Callable[[], Suite]] = {
    "clip": clip_suite,
    "open_clip": lambda: suite_of(OpenClipTower(), _images()),
    "t5": t5_suite,
    "umt5": lambda: t5_suite("umt5"),
    **{kind: (lambda kind=kind: decoder_suite(kind)) for kind in DECODERS},
    "gpt2": gpt2_suite,
    "residual": residual_suite,
}
