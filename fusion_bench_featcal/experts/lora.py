"""Experts stored as LoRA adapters, made whole tensor by tensor: base + scale * B A."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from fusion_bench_featcal.experts.expert_model import first_rows
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert
from fusion_bench_featcal.experts.source import ExpertSource, SourceView
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.untrusted import read_json

_PREFIX = "base_model.model."  # what PEFT puts before the names of the model it wraps
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Keys of adapter_config.json that say what the weights are worth, and those that tell how they
# were trained or where they apply, which the weights' own names tell better. Any other key that is
# set changes the weights in a way that is not known here.
_USED = {"peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora"}
_USED |= {"fan_in_fan_out", "bias", "init_lora_weights"}
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules",
    "inference_mode", "layers_pattern", "layers_to_transform", "lora_dropout", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules",
    "task_type",
}  # fmt: skip
# Other initialisations (pissa, olora, ...) change the base weights themselves.
_PLAIN_STARTS = (True, False, "gaussian")


class LoraExpert(SourceView):
    """Weights of a base model with a LoRA adapter added, as PEFT merges them."""

    def __init__(self, base: ExpertSource, adapter: str | Path, part: str = "") -> None:
        """Pair an adapter's matrices with the base's tensors.

        Args:
            base: The base model's weights.
            adapter: Folder with `adapter_config.json` and `adapter_model.safetensors`.
            part: Beginning of the names of the base's part that the adapter was made for, such as
                `vision_model.`.

        Raises:
            FileNotFoundError: If a file is missing.
            CalibrationError: If the adapter is of another kind than plain LoRA, or does not fit
                the base.
        """
        super().__init__(base)
        self._folder = Path(adapter)
        self._part = part
        self._config = _read_config(self._folder)
        self._weights = SafetensorsExpert(self._folder / "adapter_model.safetensors")
        self._adapted = self._pair()

    def nbytes(self, name: str) -> int:
        """Return the bytes of one tensor of the base and of the adapter's two, if it has them."""
        module = self._adapted.get(name)
        ends = () if module is None else (_A, _B)
        adapter = sum(self._weights.nbytes(f"{_PREFIX}{module}{end}") for end in ends)
        return adapter + super().nbytes(name)

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, with the adapter's share if it has one, in the base's dtype."""
        return self._changed(super().tensor(name), name)

    def first_rows(self, name: str, count: int) -> Tensor:
        """Return the first rows of one tensor."""
        return self._changed(first_rows(self._source, name, count), name)

    def _changed(self, rows: Tensor, name: str) -> Tensor:
        """Add the adapter's share to the first rows of a tensor."""
        module = self._adapted.get(name)
        if module is None:
            return rows
        down = self._weights.tensor(_PREFIX + module + _A).float()
        up = self._weights.tensor(_PREFIX + module + _B).float()
        if self._config.get("fan_in_fan_out"):
            change = (up @ down[:, : len(rows)]).T
        else:
            change = up[: len(rows)] @ down
        return (rows.float() + change * self._scale(module, len(down))).to(rows.dtype)

    def _scale(self, module: str, rank: int) -> float:
        alpha = _by_pattern(self._config.get("alpha_pattern"), module, self._config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self._config.get("use_rslora") else rank)

    def _pair(self) -> dict[str, str]:
        """Name of each adapted tensor of the base -> its module in the adapter."""
        names = self._weights.names()
        ends = [name for name in names if name.endswith((_A, _B)) and name.startswith(_PREFIX)]
        strange = sorted(names - set(ends))
        if strange:
            raise self._unusable(f"{strange[0]!r} is no LoRA matrix of a linear module")
        modules = {re.sub(r"\.lora_[AB]\.weight$", "", name)[len(_PREFIX) :] for name in ends}
        for module in sorted(modules):
            if not {_PREFIX + module + _A, _PREFIX + module + _B} <= names:
                raise self._unusable(f"{module!r} has only one of its two matrices")
            self._check_shape(module)
        return {f"{self._part}{module}.weight": module for module in modules}

    def _check_shape(self, module: str) -> None:
        name = f"{self._part}{module}.weight"
        if name not in self.names():
            raise self._unusable(f"the base has no module {module!r}; the adapter is for another")
        rank, inputs = self._weights.shape(_PREFIX + module + _A)
        outputs, other = self._weights.shape(_PREFIX + module + _B)
        in_config = _by_pattern(self._config.get("rank_pattern"), module, self._config["r"])
        if not rank == other == in_config:
            raise self._unusable(
                f"{module!r} has ranks {rank} and {other}, not {in_config} as its config"
            )
        shape = (inputs, outputs) if self._config.get("fan_in_fan_out") else (outputs, inputs)
        stored = self.shape(name)
        if stored != shape:
            raise self._unusable(f"{module!r} changes a weight {shape}, the base's is {stored}")

    def _unusable(self, reason: str) -> CalibrationError:
        return CalibrationError(
            f"LoRA adapter {self._folder}: {reason}. Check modelpool.models, or set "
            "method.stream_experts=false to have PEFT load it whole"
        )


def _read_config(folder: Path) -> dict[str, Any]:
    """An adapter's config, refused where it is more than plain LoRA.

    Raises:
        FileNotFoundError: If there is none.
        CalibrationError: If it is damaged or not understood, naming the key.
    """
    file = folder / "adapter_config.json"
    try:
        config = read_json(file)
        kind = config["peft_type"], config["r"], config["lora_alpha"]
        _check_ranks(config)
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"{file} is no LoRA adapter's config: {error!r}") from error
    unknown = {key for key, value in config.items() if value} - _USED - _WITHOUT_EFFECT
    odd = {key: config[key] for key in sorted(unknown)}
    if kind[0] != "LORA":
        odd["peft_type"] = kind[0]
    if config.get("bias", "none") != "none":
        odd["bias"] = config["bias"]
    if config.get("init_lora_weights", True) not in _PLAIN_STARTS:
        odd["init_lora_weights"] = config["init_lora_weights"]
    if odd:
        raise CalibrationError(
            f"{file}: only plain LoRA is read block by block, not {odd}. Set "
            "method.stream_experts=false to have PEFT load this expert whole"
        )
    return config


def _check_ranks(config: Mapping[str, Any]) -> None:
    """Refuse ranks and scales that are no numbers, and patterns that may take any time to match.

    Raises:
        ValueError: Naming the key.
    """
    numbers = {"r": config["r"], "lora_alpha": config["lora_alpha"]}
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"{key} is {patterns!r:.60}")
        for pattern, number in patterns.items():
            numbers[f"{key} {pattern!r:.60}"] = number
            if re.search(r"\)[*+{]|([*+{].*){5}", pattern) or not _compiles(pattern):
                raise ValueError(
                    f"{key} {pattern!r:.60} is no plain pattern: write the modules' names"
                )
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{key} is {number!r:.60}")


def _compiles(pattern: str) -> bool:
    try:
        return bool(re.compile(pattern))
    except re.error:
        return False


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """A module's own value where a pattern names it (any end of its name), else the default."""
    for pattern, value in (patterns or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return default
