"""The calibrated model as a PEFT adapter of its base: the best low-rank form of the change."""

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from fusion_bench_featcal.experts.lora import PREFIX
from fusion_bench_featcal.folders.model_folder import ModelFolder

ADAPTER = "adapter"
"""Folder of the adapter inside the model's folder."""
_WHOLE = 512
"""Matrices with a smaller side up to this size get a full singular value decomposition."""
_LISTED = 3
_TASK_TYPES = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}


@dataclass
class Adapter:
    """A LoRA adapter in PEFT's format.

    Attributes:
        rank: Rank of the factors.
        tensors: Name in the adapter's file -> tensor on the CPU.
        factored: Modules with factors.
        saved: Modules that are stored whole.
        left_out: Modules whose change is not stored.
        energy: Energy (squared norm) of the factored modules' change.
        lost: Energy of the change that the rank omits.
        has_inputs_first: Whether weights of adapted modules are stored as `[inputs, outputs]`.
    """

    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    factored: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    energy: float = 0.0
    lost: float = 0.0
    has_inputs_first: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, base: nn.Module, calibrated: nn.Module, rank: int) -> "Adapter":
        """Approximate the change from a base to the calibrated model.

        Args:
            base: The base. It is changed to the model that PEFT builds from base and adapter.
            calibrated: The calibrated model, of the same class and sizes.
            rank: Rank of each module's factors.
        """
        adapter = cls(rank)
        uses = Counter(
            id(parameter)
            for model in (base, calibrated)
            for _, parameter in model.named_parameters(remove_duplicate=False)
        )
        for name, module in base.named_modules():
            other = calibrated.get_submodule(name)
            parameters = dict(module.named_parameters(recurse=False))
            pairs = {key: (value, other.get_parameter(key)) for key, value in parameters.items()}
            if all(torch.equal(value, new) for value, new in pairs.values()):
                continue
            shared = any(uses[id(part)] > 1 for pair in pairs.values() for part in pair)
            if shared or next(module.children(), None) is not None:
                adapter.left_out.append(name)
            elif isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                adapter._add_factors(name, module, other)
            else:
                adapter.saved.append(name)
                for key, (value, new) in pairs.items():
                    value.copy_(new)
                    adapter._add(f"{name}.{key}", new)
        return adapter

    def _add_factors(self, name: str, module: nn.Module, other: nn.Module) -> None:
        weight, is_embedding = module.get_parameter("weight"), isinstance(module, nn.Embedding)
        change = other.get_parameter("weight").float() - weight.float()
        inputs_first = not isinstance(module, nn.Linear)
        down, up = factors(change.T if inputs_first else change, self.rank)
        approximate = (up @ down).T if inputs_first else up @ down
        self.factored.append(name)
        self.energy += float(change.square().sum())
        self.lost += float((change - approximate).square().sum())
        weight.copy_(weight.float() + approximate)
        infix, ending = ("embedding_", "") if is_embedding else ("", ".weight")
        self._add(f"{name}.lora_{infix}A{ending}", down)
        self._add(f"{name}.lora_{infix}B{ending}", up)
        self.has_inputs_first |= isinstance(module, Conv1D)
        for key, bias in module.named_parameters(recurse=False):
            if key == "bias":
                bias.copy_(other.get_parameter(key))
                self._add(f"{name}.base_layer.bias", bias)

    def _add(self, name: str, tensor: Tensor) -> None:
        self.tensors[PREFIX + name] = tensor.detach().cpu().clone().contiguous()

    def note(self) -> str:
        """Return a sentence on the part of the change that the adapter omits."""
        share = 100 * self.lost / (self.energy or 1)
        text = f"adapter of rank {self.rank}: {share:.1f} % of the change's energy is lost"
        if self.left_out:
            few = ", ".join(name or "the model itself" for name in self.left_out[:_LISTED])
            text += f". Not in it: tied weights and those beside submodules, of {few}"
            text += " and others" if len(self.left_out) > _LISTED else ""
        return text

    def write(self, folder: Path, kind: str, base: str | None) -> None:
        """Write the adapter in PEFT's format.

        Args:
            folder: A new folder.
            kind: Kind of the base.
            base: The base's folder or hub id, for the adapter's config.
        """
        folder.mkdir()
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": _TASK_TYPES.get(kind),
            "base_model_name_or_path": base,
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": self.factored,
            "modules_to_save": self.saved or None,
            "bias": "lora_only" if any(".base_layer." in name for name in self.tensors) else "none",
            "fan_in_fan_out": self.has_inputs_first,
            "inference_mode": True,
        }
        text = json.dumps(config, indent=1) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        save_file(self.tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors A and B whose product B A is closest to a change.

    Args:
        change: Float32 `[outputs, inputs]`.
        rank: Rank. For a smaller matrix, further rows of A and columns of B are zero.

    Returns:
        A `[rank, inputs]` and B `[outputs, rank]`.
    """
    smaller = min(change.shape)
    if smaller <= _WHOLE:
        left_vectors, values, right_vectors = torch.linalg.svd(change, full_matrices=False)
        right_vectors = right_vectors.T
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            left_vectors, values, right_vectors = torch.svd_lowrank(
                change, min(2 * rank + 10, smaller), niter=4
            )
    roots = values[:rank].sqrt()
    down, up = (right_vectors[:, :rank] * roots).T, left_vectors[:, :rank] * roots
    more = rank - len(roots)
    return F.pad(down, (0, 0, 0, more)), F.pad(up, (0, more))


def check_base(base: ModelFolder | None, home: ModelFolder) -> None:
    """Refuse a base of another class or size, which no adapter can change into the model."""
    if base is None:
        raise ValueError("--as-lora needs --base, the model that the adapter changes")
    shapes, home_shapes = (
        {name: tensor.shape for name, tensor in model.empty.state_dict().items()}
        for model in (base, home)
    )
    if base.architecture is not home.architecture or shapes != home_shapes:
        raise ValueError(
            f"--as-lora: {base.option} and {home.option} are not of one class and size "
            f"({base.architecture.__name__}, {home.architecture.__name__}). Leave --as-lora out"
        )
