"""The calibrated model as a PEFT adapter over its base: the best low-rank form of the change."""

import json
from collections import Counter
from collections.abc import Mapping
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
"""Folder of the adapter inside the model's."""
_WHOLE = 512
"""Smaller side of a matrix up to which its singular values are all computed."""
_LISTED = 3


@dataclass
class Adapter:
    """A LoRA adapter in PEFT's format.

    Attributes:
        rank: Rank of the factors.
        tensors: Name in the adapter's file -> tensor on the CPU.
        lost: Module -> share of its change's energy (squared norm) that the rank leaves out.
        energy: Module -> energy of its change.
        saved: Modules that are stored whole.
        left_out: Modules whose change is not stored.
        has_inputs_first: Whether weights of adapted modules are stored as `[inputs, outputs]`.
    """

    rank: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    lost: dict[str, float] = field(default_factory=dict)
    energy: dict[str, float] = field(default_factory=dict)
    saved: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    has_inputs_first: bool = False

    @classmethod
    @torch.no_grad()
    def of(cls, base: nn.Module, calibrated: nn.Module, rank: int) -> "Adapter":
        """Approximate the change from a base to the calibrated model.

        Args:
            base: The base, which is changed: to the model that PEFT makes of base and adapter.
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
            own = dict(module.named_parameters(recurse=False))
            pairs = {key: (value, other.get_parameter(key)) for key, value in own.items()}
            if all(torch.equal(value, new) for value, new in pairs.values()):
                continue
            shared = any(uses[id(part)] > 1 for pair in pairs.values() for part in pair)
            if shared or (next(module.children(), None) is not None):
                adapter.left_out.append(name)
            elif isinstance(module, nn.Linear | nn.Embedding | Conv1D):
                adapter._add_factors(name, module, other)
            else:
                adapter.saved.append(name)
                adapter._add_whole(name, pairs)
        return adapter

    def _add_factors(self, name: str, module: nn.Module, other: nn.Module) -> None:
        weight, is_embedding = module.get_parameter("weight"), isinstance(module, nn.Embedding)
        change = other.get_parameter("weight").float() - weight.float()
        inputs_first = not isinstance(module, nn.Linear)
        down, up = factors(change.T if inputs_first else change, self.rank)
        approximate = (up @ down).T if inputs_first else up @ down
        energy = float(change.square().sum())
        self.energy[name] = energy
        self.lost[name] = float((change - approximate).square().sum()) / energy if energy else 0.0
        weight.copy_(weight.float() + approximate)
        infix, ending = ("embedding_", "") if is_embedding else ("", ".weight")
        self._add(f"{name}.lora_{infix}A{ending}", down)
        self._add(f"{name}.lora_{infix}B{ending}", up)
        self.has_inputs_first |= isinstance(module, Conv1D)
        if getattr(module, "bias", None) is not None:
            bias = module.get_parameter("bias")
            bias.copy_(other.get_parameter("bias"))
            self._add(f"{name}.base_layer.bias", bias)

    def _add_whole(self, name: str, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        for key, (value, new) in pairs.items():
            value.copy_(new)
            self._add(f"{name}.{key}", new)

    def _add(self, name: str, tensor: Tensor) -> None:
        self.tensors[PREFIX + name] = tensor.detach().cpu().clone().contiguous()

    def note(self) -> str:
        """Say what the adapter leaves out."""
        total = sum(self.energy.values())
        share = sum(self.lost[name] * self.energy[name] for name in self.lost) / (total or 1)
        most = sorted(self.lost, key=self.lost.__getitem__, reverse=True)[:_LISTED]
        listed = ", ".join(f"{name} {100 * self.lost[name]:.1f} %" for name in most)
        text = f"adapter of rank {self.rank}: {100 * share:.1f} % of the change's energy is lost"
        text += f" (most in {listed}; all in {ADAPTER}/lost.json)" if most else ""
        if self.left_out:
            few = ", ".join(name or "the model itself" for name in self.left_out[:_LISTED])
            text += f". Not in it: tied weights and those beside submodules, of {few}"
            text += " and others" if len(self.left_out) > _LISTED else ""
        return text

    def write(self, folder: Path, base: ModelFolder, location: str | None) -> None:
        """Write the adapter as PEFT does, and the shares that are lost.

        Args:
            folder: A new folder.
            base: The base.
            location: The base's folder or hub id, as the adapter's config names it.
        """
        folder.mkdir()
        task_types = {"causal": "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
        config: dict[str, Any] = {
            "peft_type": "LORA",
            "task_type": task_types.get(base.kind),
            "base_model_name_or_path": location,
            "r": self.rank,
            "lora_alpha": self.rank,
            "target_modules": list(self.lost),
            "modules_to_save": self.saved or None,
            "bias": "lora_only" if any(".base_layer." in name for name in self.tensors) else "none",
            "fan_in_fan_out": self.has_inputs_first,
            "inference_mode": True,
        }
        for name, content in (("adapter_config.json", config), ("lost.json", self.lost)):
            (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        save_file(self.tensors, folder / "adapter_model.safetensors", {"format": "pt"})


def factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors A and B whose product B A is closest to a change.

    Args:
        change: Float32 `[outputs, inputs]`.
        rank: Rank; of a smaller matrix further rows of A and columns of B are zero.

    Returns:
        A `[rank, inputs]` and B `[outputs, rank]`.
    """
    smaller = min(change.shape)
    if smaller <= _WHOLE:
        left, values, right = torch.linalg.svd(change, full_matrices=False)
        right = right.T
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            left, values, right = torch.svd_lowrank(change, min(2 * rank + 10, smaller), niter=4)
    roots = values[:rank].sqrt()
    down, up = (right[:, :rank] * roots).T, left[:, :rank] * roots
    more = rank - len(roots)
    return F.pad(down, (0, 0, 0, more)), F.pad(up, (0, more))


def check_base(base: ModelFolder | None, home: ModelFolder) -> None:
    """Refuse a base over which the calibrated model cannot be an adapter.

    Raises:
        ValueError: If there is none, or it has another class or other sizes.
    """
    if base is None:
        raise ValueError("--as-lora needs --base, the model that the adapter changes")
    shapes, others = (
        {name: tensor.shape for name, tensor in model.empty.state_dict().items()}
        for model in (base, home)
    )
    if base.architecture is not home.architecture or shapes != others:
        raise ValueError(
            f"--as-lora: {base.option} and {home.option} are not of one class and size "
            f"({base.architecture.__name__}, {home.architecture.__name__}). Leave --as-lora out"
        )
