"""Experts stored as PEFT adapters, expanded tensor by tensor: base + scale * B A, or DoRA."""

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import ExpertSource, SourceView, rows_of
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.untrusted import read_json

PREFIX = "base_model.model."  # PEFT's prefix for names of the model it wraps
_FACTOR = re.compile(
    re.escape(PREFIX)
    + r"(?P<module>.+)\.lora_(?P<kind>(?:embedding_)?[AB]|magnitude_vector)(?:\.weight)?"
)
# Keys of adapter_config.json that define the scale of the weights, and keys about training or
# target modules, which the tensors' names define more reliably. Any other key that is set may
# change the weights in an unsupported way.
_USED = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
_USED |= {"fan_in_fan_out", "init_lora_weights"}
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout",
    "megatron_core", "modules_to_save", "peft_version", "qalora_group_size", "revision",
    "runtime_config", "target_modules", "task_type", "use_dora",
}  # fmt: skip
# Other initialisations (pissa, olora, ...) change the base weights themselves.
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")
_MERGE_IT = "Merge it by PEFT (merge_and_unload, save_pretrained) and name that folder instead"


@dataclass(frozen=True)
class _Change:
    """Change of one weight: names of the adapter's tensors and their use.

    Attributes:
        down: The factor A, `[rank, inputs]`.
        up: The factor B, `[outputs, rank]`.
        magnitude: DoRA's norm of each output, or None for plain LoRA.
        scale: Factor of B A.
        is_transposed: Whether the base stores its weight as `[inputs, outputs]`.
    """

    down: str
    up: str
    magnitude: str | None
    scale: float
    is_transposed: bool


class LoraExpert(SourceView):
    """Weights of a base model plus a LoRA or DoRA adapter, merged as PEFT does it.

    Fully trained modules (`modules_to_save`, biases) replace the base's modules.
    """

    def __init__(self, base: ExpertSource, adapter: str | Path, part: str = "") -> None:
        """Map an adapter's matrices to the base's tensors.

        Args:
            base: The base model's weights.
            adapter: Folder with `adapter_config.json` and `adapter_model.safetensors`.
            part: Prefix of the base's tensors that the adapter was trained for, such as
                `vision_model.`.

        Raises:
            FileNotFoundError: If a file is missing.
            CalibrationError: If the kind of adapter is not supported, or it does not fit the base.
        """
        super().__init__(base)
        self._folder = Path(adapter)
        self._part = part
        self._config = _read_config(self._folder)
        self._weights = SafetensorsExpert(self._folder / "adapter_model.safetensors")
        self._changes: dict[str, _Change] = {}
        self._copies: dict[str, str] = {}  # tensor of the base -> its full copy in the adapter
        self._pair()

    def origins(self, name: str) -> list[tuple[ExpertSource, str]]:
        """Return the tensors of base and adapter that one tensor is computed from."""
        if name in self._copies:
            return [(self._weights, self._copies[name])]
        change = self._changes.get(name)
        names = () if change is None else (change.down, change.up, change.magnitude)
        return [*super().origins(name), *((self._weights, factor) for factor in names if factor)]

    def tensor(self, name: str) -> Tensor:
        """Return one tensor in the base's dtype, including the adapter's change."""
        if name in self._copies:
            return self._weights.tensor(self._copies[name])
        return self._changed(super().tensor(name), name)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return some rows of one tensor."""
        change = self._changes.get(name)
        if name in self._copies or (change is not None and change.is_transposed):
            return self.tensor(name)[start:stop]  # DoRA's norms are over all rows (inputs)
        return self._changed(rows_of(self._source, name, start, stop), name, start)

    def _changed(self, rows: Tensor, name: str, start: int = 0) -> Tensor:
        """Add the adapter's change to rows of a tensor, from row `start` on."""
        change = self._changes.get(name)
        if change is None:
            return rows
        down = self._weights.tensor(change.down).float().flatten(1)
        up = self._weights.tensor(change.up).float().flatten(1)
        weight = (rows.T if change.is_transposed else rows).float().flatten(1)
        weight = weight + (up[start : start + len(weight)] @ down) * change.scale
        if change.magnitude is not None:
            magnitude = (
                self._weights.tensor(change.magnitude).float().flatten()[start:][: len(weight)]
            )
            weight = weight * (magnitude / weight.norm(dim=1)).unsqueeze(1)
        weight = weight.T if change.is_transposed else weight
        return weight.reshape(rows.shape).to(rows.dtype)

    def _pair(self) -> None:
        """Find the base's tensor for each of the adapter's tensors.

        Raises:
            CalibrationError: If there is none, or it has another shape.
        """
        factors: dict[str, dict[str, str]] = defaultdict(dict)
        for name in sorted(self._weights.names()):
            if match := _FACTOR.fullmatch(name):
                factors[match["module"]][match["kind"]] = name
            else:
                self._add_copy(name)
        for module, names in factors.items():
            embedding = "embedding_" if "embedding_A" in names else ""
            if not {f"{embedding}A", f"{embedding}B"} <= names.keys():
                raise self._unusable(f"{module!r} has only one of its two matrices")
            down, up = names[f"{embedding}A"], names[f"{embedding}B"]
            self._changes[f"{self._part}{module}.weight"] = _Change(
                down,
                up,
                names.get("magnitude_vector"),
                self._scale(module, self._weights.shape(down)[0]),
                self._is_transposed(module, down, up, is_embedding=bool(embedding)),
            )

    def _add_copy(self, name: str) -> None:
        target = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.)", "", name)
        target = self._part + target.removeprefix(PREFIX)
        if target not in self.names():
            raise self._unusable(f"it has {name!r}, and the base no tensor {target!r}")
        shape, stored = self._weights.shape(name), self.shape(target)
        if shape != stored:
            raise self._unusable(f"{name!r} has shape {shape}, the base's is {stored}")
        self._copies[target] = name

    def _scale(self, module: str, rank: int) -> float:
        alpha = _by_pattern(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _is_transposed(self, module: str, down: str, up: str, *, is_embedding: bool) -> bool:
        """Return whether the base stores inputs first. Checks all shapes."""
        name = f"{self._part}{module}.weight"
        if name not in self.names():
            raise self._unusable(f"the base has no module {module!r}, so it is for another")
        rank, *inputs = self._weights.shape(down)
        outputs, other, *_ = self._weights.shape(up)
        in_config = _by_pattern(self._config.get("rank_pattern"), module, self._config["r"])
        if not rank == other == in_config:
            raise self._unusable(
                f"{module!r} has ranks {rank} and {other}, not {in_config} as its config"
            )
        stored, straight = self.shape(name), (outputs, *inputs)
        inputs_first = is_embedding or bool(self._config.get("fan_in_fan_out"))
        if inputs_first and stored == straight[::-1]:
            return True
        if is_embedding or stored != straight:  # PEFT sets the flag for mixed models too
            raise self._unusable(f"{module!r} changes a weight {straight}, the base's is {stored}")
        return False

    def _unusable(self, reason: str) -> CalibrationError:
        return CalibrationError(
            f"LoRA adapter {self._folder}: {reason}. Check modelpool.models. {_MERGE_IT}"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """Return an adapter's config. Unsupported kinds are refused.

    Raises:
        FileNotFoundError: If there is none.
        CalibrationError: If it is damaged, or a key is not supported, naming the key.
    """
    file = folder / "adapter_config.json"
    try:
        config = read_json(file)
        kind = config["peft_type"], config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{file} is no LoRA adapter's config: {error!r}") from error
    unknown = {key for key, value in config.items() if value} - _USED - _WITHOUT_EFFECT
    odd = {key: config[key] for key in sorted(unknown)}
    if kind[0] != "LORA":
        odd["peft_type"] = kind[0]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        odd["init_lora_weights"] = config["init_lora_weights"]
    if odd:
        raise CalibrationError(f"{file}: an adapter with {odd} cannot be read here. {_MERGE_IT}")
    return config


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Return a module's value if a pattern matches an end of its name, else the default."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
