"""Experts stored as adapters of PEFT.

Plain LoRA is expanded tensor by tensor, as base + scale * B A. PEFT merges all others.
"""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.errors import stubs_text
from fusion_bench_featcal.models.vocabulary import VOCABULARY

_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
START = "base_model.model."
_FACTOR = re.compile(rf"{re.escape(START)}(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
_NUMBER = re.compile(r"\d+")
# What other methods than these learn is a change of the weights.
_BESIDE_THE_WEIGHTS = {
    **dict.fromkeys(
        ("ADAPTION_PROMPT", "CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "P_TUNING",
         "PREFIX_TUNING", "PROMPT_TUNING"), "a prompt"),
    "POLY": "a choice of modules per task", "SHADOW": "a second model", "XLORA": "a router",
}  # fmt: skip
# Keys of adapter_config.json that define the scale, and keys about training or target modules,
# which the tensors' names define more reliably. Any other key that is set changes the weights.
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "init_lora_weights"}
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config",
    "target_modules", "task_type",
}  # fmt: skip
# Other initialisations (pissa, olora, ...) change the base weights themselves.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


class OtherAdapterError(ValueError):
    """An adapter that is not plain LoRA: PEFT merges it, with the whole model in memory."""


def adapter_config(folder: Path) -> dict[str, Any]:
    """Return the content of an adapter's config, of a method that changes weights.

    Raises:
        FileNotFoundError: If there is no file.
        CalibrationError: If it is damaged, or what the method learns is not in the weights.
    """
    file = folder / _CONFIG
    try:
        config = read_json(file)
        kind = config["peft_type"]
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{file} is no adapter's config: {error!r}") from error
    if not isinstance(kind, str):
        raise CalibrationError(f"{file}: peft_type is {kind!r:.60}, not the name of a method")
    if beside := _BESIDE_THE_WEIGHTS.get(kind):
        raise CalibrationError(
            f"{file}: {kind} learns {beside}, which is not in the weights, so there is nothing to "
            "merge. Name an adapter of another method, such as LoRA, or a whole model"
        )
    return config


def check_adapter(folder: Path) -> None:
    """Check an adapter's config and header.

    Raises:
        CalibrationError: As `adapter_config`, or if its tensors have no values.
    """
    adapter_config(folder)
    file = folder / WEIGHTS
    if file.is_file() and (problem := stubs_text(SafetensorsExpert(file))):
        raise CalibrationError(problem)


class LoraExpert(SourceView):
    """Weights of a base model plus a LoRA or rsLoRA adapter of linear modules."""

    def __init__(self, base: ExpertSource, adapter: str | Path, part: str = "") -> None:
        """Map an adapter's matrices to the base's tensors.

        Args:
            base: The base model's weights.
            adapter: Folder with `adapter_config.json` and `adapter_model.safetensors`.
            part: Prefix of the base's tensors that the adapter was trained for, such as
                `vision_model.`.

        Raises:
            FileNotFoundError: If a file is missing.
            OtherAdapterError: If it is not plain LoRA.
            CalibrationError: If a file is damaged, or the adapter does not fit the base.
        """
        super().__init__(base)
        self._folder = Path(adapter)
        config = _plain_config(self._folder)
        self._alpha, self._has_root = float(config["lora_alpha"]), bool(config.get("use_rslora"))
        self._weights = SafetensorsExpert(self._folder / WEIGHTS)
        factors: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self._weights.names()):
            match = _FACTOR.fullmatch(name)
            if match is None:
                raise OtherAdapterError(f"{self._folder} has {name!r}, which is no factor of LoRA")
            weight = f"{part}{match['module']}.weight"
            if weight.endswith(VOCABULARY):  # may be tied, which PEFT handles
                raise OtherAdapterError(f"{self._folder} changes the vocabulary matrix {weight}")
            factors[weight][match["kind"]] = name
        self._changes = {name: self._checked(name, pair) for name, pair in factors.items()}
        self._check_ranks(config.get("r"))
        self._check_targets(config.get("target_modules"), part)
        if not (config.get("layers_to_transform") or config.get("exclude_modules")):
            self._check_layers(config.get("target_modules"))

    def _checked(self, name: str, factors: dict[str, str]) -> list[str]:
        """Return the names of a weight's factors A `[rank, inputs]` and B `[outputs, rank]`."""
        names = [factors[kind] for kind in sorted(factors)]
        stored = list(self.shape(name)) if name in self.names() else None
        shapes = [list(self._weights.shape(factor)) for factor in names]
        if any(len(shape) > 2 for shape in shapes):
            raise OtherAdapterError(f"{self._folder}: {name} is a convolution")
        if [len(shape) for shape in shapes] == [2, 2]:
            (rank, inputs), (outputs, other) = shapes
            if rank == other and stored == [outputs, inputs]:
                return names
            if stored == [inputs, outputs]:
                raise OtherAdapterError(f"{self._folder}: {name} is stored as [inputs, outputs]")
        there = "is not there" if stored is None else f"is {stored} there"
        raise CalibrationError(
            f"LoRA adapter {self._folder} does not fit the base: {name} {there}, and its "
            f"matrices A and B are {shapes}. Check the adapter and its base"
        )

    def _check_ranks(self, rank: Any) -> None:
        """Refuse matrices of another rank than the config's, by which the scale is divided."""
        for weight, (down, _) in self._changes.items():
            stored = self._weights.shape(down)[0]
            if isinstance(rank, int) and stored != rank:
                raise CalibrationError(
                    f"LoRA adapter {self._folder}: the matrices of {weight} have the rank "
                    f"{stored}, and r of its config is {rank}. Correct r, which scales the adapter"
                )

    def _check_targets(self, targets: Any, part: str) -> None:
        """Refuse an adapter without matrices of a target: the base would run unchanged there."""
        for target in targets if isinstance(targets, list) else ():
            end = f".{target}.weight"
            has_target = any(f".{n}".endswith(end) for n in self.names() if n.startswith(part))
            if has_target and not any(f".{name}".endswith(end) for name in self._changes):
                raise CalibrationError(
                    f"LoRA adapter {self._folder} has no matrices of {target!r}, which is in "
                    "target_modules of its config. Correct one of them"
                )

    def _check_layers(self, targets: Any) -> None:
        """Refuse an adapter without matrices of a target in some layers, as in a part of a file."""
        ends = tuple(f".{target}.weight" for target in targets) if isinstance(targets, list) else ()
        layers = {_NUMBER.sub("#", name) for name in self._changes}
        missing = [
            name
            for name in sorted(self.names() - self._changes.keys())
            if f".{name}".endswith(ends) and _NUMBER.sub("#", name) in layers
        ]
        if ends and missing:
            raise CalibrationError(
                f"LoRA adapter {self._folder} lacks the matrices of "
                f"{counted(len(missing), 'weight')} that target_modules of its config names, such "
                f"as {missing[0]}: its file is not complete, or its config lacks "
                "layers_to_transform"
            )

    def nbytes(self, name: str) -> int:
        """Return the adapter's bytes to read for one tensor. The base's count as the base's."""
        return sum(map(self._weights.nbytes, self._changes.get(name, ())))

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in the base's dtype, including the adapter's change."""
        return self._changed(super().tensor(name), name, 0)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor."""
        return self._changed(self._source.rows(name, start, stop), name, start)

    def _changed(self, rows: Tensor, name: str, start: int) -> Tensor:
        """Add the adapter's change to rows of a tensor, from row `start` on."""
        if (change := self._changes.get(name)) is None:
            return rows
        down, up = (self._weights.tensor(factor).float() for factor in change)
        scale = self._alpha / (math.sqrt(len(down)) if self._has_root else len(down))
        return (rows.float() + (up[start : start + len(rows)] @ down) * scale).to(rows.dtype)


def _plain_config(folder: Path) -> dict[str, Any]:
    """Return the config of a plain LoRA adapter.

    Raises:
        FileNotFoundError: If there is no file.
        OtherAdapterError: If it describes another adapter.
        CalibrationError: As `adapter_config`.
    """
    config, file = adapter_config(folder), folder / _CONFIG
    kind = config["peft_type"]
    odd = {key for key, value in config.items() if value and value != "none"}
    odd -= _READ | _WITHOUT_EFFECT
    if kind != "LORA" or odd or config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise OtherAdapterError(f"{file}: {kind} with {sorted(odd)} is not plain LoRA")
    if not isinstance(config.get("lora_alpha"), int | float):
        raise CalibrationError(f"{file} has no number lora_alpha")
    return config
