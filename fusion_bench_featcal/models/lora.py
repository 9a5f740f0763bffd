"""Experts stored as plain LoRA adapters, expanded tensor by tensor: base + scale * B A."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import first_line
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.models.vocabulary import VOCABULARY

_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<kind>[AB])\.weight")
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


class OtherAdapterError(CalibrationError):
    """An adapter that is not plain LoRA: PEFT merges it, with the whole model in memory."""


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
        self._alpha, self._has_root = _read_config(self._folder / "adapter_config.json")
        self._weights = SafetensorsExpert(self._folder / "adapter_model.safetensors")
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

    def _checked(self, name: str, factors: dict[str, str]) -> list[str]:
        """Return the names of a weight's factors A `[rank, inputs]` and B `[outputs, rank]`."""
        names = [factors[kind] for kind in sorted(factors)]
        stored = list(self.shape(name)) if name in self.names() else None
        shapes = [list(self._weights.shape(factor)) for factor in names]
        if any(len(shape) > 2 for shape in shapes):
            raise OtherAdapterError(f"{self._folder}: {name} is a convolution")
        if len(shapes) == 2:
            (rank, inputs), (outputs, other) = shapes
            if rank == other and stored == [outputs, inputs]:
                return names
            if stored == [inputs, outputs]:
                raise OtherAdapterError(f"{self._folder}: {name} is stored as [inputs, outputs]")
        raise CalibrationError(
            f"LoRA adapter {self._folder} does not fit the base: {name} is {stored} there, and its "
            f"matrices A and B are {shapes}. Check the adapter and its base"
        )

    def nbytes(self, name: str) -> int:
        """Return the bytes to read for one tensor: the base's and its two factors."""
        return super().nbytes(name) + sum(map(self._weights.nbytes, self._changes.get(name, ())))

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


def merged_by_peft(model: nn.Module, adapter: Path) -> nn.Module:
    """Return a model with an adapter of any kind merged into its weights, which are changed.

    Raises:
        CalibrationError: If it has no safetensors file, or PEFT cannot merge it.
    """
    from peft import PeftModel  # slow to import

    # PEFT would read a pickle instead, and import the module that `megatron_core` names.
    if not (file := adapter / "adapter_model.safetensors").is_file():
        raise CalibrationError(
            f"there is no {file}: load the adapter in PEFT, and save it with save_pretrained"
        )
    if read_json(adapter / "adapter_config.json").get("megatron_config"):
        raise CalibrationError(f"adapter {adapter} is for Megatron, whose modules are not loaded")
    try:
        wrapped: Any = PeftModel.from_pretrained(model, str(adapter))  # type: ignore[arg-type]
        return wrapped.merge_and_unload()
    except Exception as error:  # a kind of adapter may raise anything
        raise CalibrationError(
            f"adapter {adapter} cannot be merged by PEFT: {first_line(error)}"
        ) from error


def _read_config(file: Path) -> tuple[float, bool]:
    """Return an adapter's alpha, and whether it is divided by the root of the rank (rsLoRA).

    Raises:
        FileNotFoundError: If there is no file.
        OtherAdapterError: If it describes another adapter than plain LoRA.
        CalibrationError: If it is damaged.
    """
    try:
        config = read_json(file)
        kind, alpha = config["peft_type"], float(config["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{file} is no LoRA adapter's config: {error!r}") from error
    odd = {key for key, value in config.items() if value and value != "none"}
    odd -= _READ | _WITHOUT_EFFECT
    if kind != "LORA" or odd or config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise OtherAdapterError(f"{file}: {kind} with {sorted(odd)} is not plain LoRA")
    return alpha, bool(config.get("use_rslora"))
