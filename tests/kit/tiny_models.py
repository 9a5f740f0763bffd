"""Tiny models of every family: no parameter is zero, one or shared by chance."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig

from fusion_bench_featcal import families

VOCABULARY = 30
NO_TARGET = -100


@dataclass
class Suite:
    """Arguments of a calibration: a base, experts scattered about it, their merger, and inputs."""

    merged: nn.Module
    base: nn.Module
    experts: dict[str, nn.Module]
    inputs: dict[str, list]
    blocks: list[str]
    family: Any = "auto"

    def to(self, dtype: torch.dtype) -> "Suite":
        """Copies of the models in another dtype. Inputs stay."""
        merged, base = (copy.deepcopy(model).to(dtype) for model in (self.merged, self.base))
        experts = {task: copy.deepcopy(e).to(dtype) for task, e in self.experts.items()}
        return replace(self, merged=merged, base=base, experts=experts)


def scatter(model: nn.Module, seed: int, size: float) -> nn.Module:
    """Copy of a model with noise on every parameter."""
    generator = torch.Generator().manual_seed(seed)
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(size * noise.to(parameter.dtype))
    return model


def add_up(base: nn.Module, experts: Mapping[str, nn.Module], scale: float) -> nn.Module:
    """Task arithmetic."""
    merged = copy.deepcopy(base)
    with torch.no_grad():
        for name, parameter in merged.named_parameters():
            tensors = [expert.get_parameter(name) for expert in experts.values()]
            parameter.add_(scale * sum(tensor - parameter for tensor in tensors))
    return merged


def suite_of(
    model: nn.Module, inputs: dict[str, list], blocks: list[str], seed: int, family: Any = "auto"
) -> Suite:
    """Base, experts and merger of one architecture, for the tasks that have inputs."""
    base = scatter(model.double(), seed, 0.15)
    experts = {t: scatter(base, 1000 * seed + i, 0.1) for i, t in enumerate(inputs, start=1)}
    return Suite(add_up(base, experts, 0.4), base, experts, inputs, blocks, family)


def listed(model: nn.Module, inputs: dict[str, list], blocks: list[str], seed: int) -> Suite:
    """Suite of a model with a chain of named blocks."""
    return suite_of(model, inputs, blocks, seed, families.Stack("|".join(blocks), compared=False))


def normal(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def batched(samples: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Cut samples into batches of the given sizes."""
    return list(samples.split(list(sizes)))


def by_task(batch: Callable[[int, int], Any], tasks: int = 2) -> dict[str, list]:
    """Two batches of each task, from the numbers of task and batch."""
    return {f"task_{task}": [batch(task, number) for number in range(2)] for task in range(tasks)}


def samples_by_task(
    tasks: int, sizes: Sequence[int], *shape: int, seed: int = 0
) -> dict[str, list[Tensor]]:
    """Batches of numbers by task, which differ in scale and mean."""
    return {
        f"task_{i}": batched((i + 1) * normal(seed + i, sum(sizes), *shape) + i, sizes)
        for i in range(tasks)
    }


def blocks_of(model: nn.Module, class_name: str) -> list[str]:
    """Names of the blocks. Releases of transformers differ in CLIP's names."""
    return [name for name, m in model.named_modules() if type(m).__name__.endswith(class_name)]


def modules_of(
    model: nn.Module, blocks: list[str], *, routers: bool = False
) -> dict[str, list[str]]:
    """Full names of linear modules, convolutions and norms with gain and shift, of each block.

    Experts of mixtures are left out, and `routers` unless they are asked for.
    """
    kinds = ("Linear", "Conv1D", "FalconLinear", "Conv2d", "GroupNorm")

    def is_calibrated(name: str, module: Any) -> bool:
        kind, parts = type(module).__name__, name.split(".")
        affine = kind.endswith("LayerNorm") and getattr(module, "bias", None) is not None
        if "experts" in parts or (not routers and {"gate", "router"} & {*parts}):
            return False
        grouped = getattr(module, "groups", 1) > 1  # kernels that stay as merged
        return (affine or kind in kinds or kind.endswith("Router")) and not grouped

    return {
        block: [name for name, module in model.get_submodule(block).named_modules(prefix=block)
                if is_calibrated(name, module)]
        for block in blocks
    }  # fmt: skip


# The class of transformers that makes a model of each type, and the numbers of its config.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("AutoModelForCausalLM", {
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": VOCABULARY,
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "tie_word_embeddings": False}),
    "t5": ("AutoModelForSeq2SeqLM", {
        "vocab_size": VOCABULARY, "d_model": 8, "d_kv": 3, "d_ff": 10, "num_heads": 2,
        "decoder_start_token_id": 0, "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10}),
    # images of 8 x 8 pixels in patches of 4 x 4: five tokens
    "clip_vision_model": ("AutoModel", {"image_size": 8, "patch_size": 4}),
}  # fmt: skip
SLOTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "head_dim": 4}
CONFIGS["qwen3_moe"] = "AutoModelForCausalLM", CONFIGS["llama"][1] | SLOTS


def model_of(kind: str = "llama", seed: int = 0, **config: Any) -> nn.Module:
    """Random model of a type."""
    torch.manual_seed(seed)
    maker, numbers = CONFIGS[kind]
    whole = AutoConfig.for_model(kind, **(numbers | config))
    return getattr(transformers, maker).from_config(whole).eval()


def clip_model(
    *, width: int = 12, heads: int = 3, depth: int = 2, hidden: int = 20, seed: int = 0
) -> nn.Module:
    """CLIP's image tower."""
    return model_of(
        "clip_vision_model", seed, hidden_size=width, intermediate_size=hidden,
        num_hidden_layers=depth, projection_dim=width, num_attention_heads=heads,
    )  # fmt: skip


def t5_model(
    *, gated: bool = True, untied: bool = False, depths: tuple[int, int] = (2, 2), seed: int = 0,
    **config: Any,
) -> nn.Module:  # fmt: skip
    """Random model. `untied` gives the head separate weights, as in FLAN-T5's checkpoints."""
    projection = {"feed_forward_proj": "gated-gelu" if gated else "relu"}
    sizes = {"num_layers": depths[0], "num_decoder_layers": depths[1]}
    model: Any = model_of("t5", seed, **(projection | sizes | config))
    if untied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def clip_suite(
    *, tasks: int = 3, sizes: Sequence[int] = (4, 3), seed: int = 0, **shape: int
) -> Suite:
    """Tiny CLIP suite in float64. Each task's images are cut into batches of `sizes`."""
    model = clip_model(seed=seed, **shape)
    inputs = {}
    for index in range(tasks):
        images = normal(seed + 10 * index, sum(sizes), 3, 8, 8) * (index + 1) / tasks
        inputs[f"task_{index}"] = [{"pixel_values": part} for part in batched(images, sizes)]
    return suite_of(model, inputs, blocks_of(model, "CLIPEncoderLayer"), seed)


class ResidualBlock(nn.Module):
    """Pre-norm residual block. The second linear has no bias, the norm after it no parameters."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.rescale = nn.LayerNorm(width, elementwise_affine=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.rescale(self.down(torch.tanh(self.up(self.norm(hidden)))))


class Stack(nn.Module):
    """Blocks between two linear maps that are not calibrated."""

    def __init__(self, make_block: Callable[[], nn.Module], depth: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.layers = nn.ModuleList(make_block() for _ in range(depth))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def residual_suite(*, tasks: int = 2, sizes: Sequence[int] = (9, 6), seed: int = 0) -> Suite:
    """Residual network on plain `[samples, features]` tensors: a row is a sample."""
    torch.manual_seed(seed)
    inputs: Any = samples_by_task(tasks, sizes, 4, seed=seed)
    net = Stack(lambda: ResidualBlock(6, 9), 3, 6)
    return listed(net, inputs, [f"layers.{i}" for i in range(3)], seed)


def sentences(
    lengths: Sequence[int], padded: int, *, side: str = "right", seed: int = 0
) -> dict[str, Tensor]:
    """Sentences of given lengths, padded on one side. The last third of each is its target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), padded)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, NO_TARGET)
    for row, length in enumerate(lengths):
        words = torch.randint(3, VOCABULARY, (length,), generator=generator)
        start = padded - length if side == "left" else 0
        target = start + length - max(1, length // 3)
        ids[row, start : start + length] = words
        mask[row, start : start + length] = 1
        labels[row, target : start + length] = ids[row, target : start + length]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


LABELS = ("none", "some", "every")


def partly_labelled_suite(longest: str, size: int) -> Suite:
    """Decoders of three tasks, in batches of `size`: no labels, some, and one for every token.

    The texts of the task `longest` are three times as long as the others.
    """
    inputs = dict[str, Any]()
    for task, labels in enumerate(LABELS):
        lengths = [n * (3 if labels == longest else 1) for n in (5, 3, 7, 4, 6, 5)]
        inputs[f"task_{task}"] = batches = []
        for start in range(0, len(lengths), size):
            some = lengths[start : start + size]
            rows = [
                sentences([n], max(some), seed=10 * task + start + i) for i, n in enumerate(some)
            ]
            batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
            if labels == "every":
                batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
            batches.append(without_labels(batch) if labels == "none" else batch)
    return suite_of(model_of("llama", 0), inputs, ["model.layers.0", "model.layers.1"], 0)


def decoder_suite(*, side: str = "right", seed: int = 0, extra: int = 0) -> Suite:
    """Suite in float64, in batches of unequal length with `extra` positions of padding."""
    lengths = [5, 9, 7], [6, 3, 4, 6]
    inputs = by_task(
        lambda task, n: sentences(
            lengths[n], max(lengths[n]) + extra, side=side, seed=seed + 10 * task + n
        )
    )
    return suite_of(model_of("llama", seed), inputs, ["model.layers.0", "model.layers.1"], seed)


ROUNDING = 2e-6
"""Norms, rotary angles and eager attention's softmax of language models are computed in float32
whatever the model's dtype: two orders of the same float64 sums agree no better than this."""


def targets_of(lengths: Sequence[int], seed: int) -> Tensor:
    """Labels of given lengths, filled up on the right."""
    texts = sentences(lengths, max(lengths), seed=seed)
    return texts["input_ids"].masked_fill(texts["attention_mask"] == 0, NO_TARGET)


def t5_batch(
    lengths: Sequence[int], targets: Sequence[int], seed: int, *, pad: int = 0
) -> dict[str, Tensor]:
    """Sentences and labels of given lengths, filled up on the right, sentences by `pad` more."""
    texts = sentences(lengths, max(lengths) + pad, seed=seed)
    return texts | {"labels": targets_of(targets, seed + 1)}


def t5_suite(*, tasks: int = 2, seed: int = 0, **shape: Any) -> Suite:
    """Tiny T5 suite in float64, with two batches a task."""
    model = t5_model(seed=seed, **shape)
    sizes = ([3, 6, 5], [4, 1, 3]), ([5, 2, 4, 4], [2, 3, 1, 2])
    inputs = by_task(
        lambda task, n: t5_batch(*sizes[n], 100 * seed + 10 * task + n, pad=1 - n), tasks
    )
    return suite_of(model, inputs, blocks_of(model, "T5Block"), seed)
