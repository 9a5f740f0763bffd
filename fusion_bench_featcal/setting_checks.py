"""Values that settings accept, in words and as tests."""

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

RULES = ("paper", "plus")
TOKEN_WEIGHTS = ("uniform", "demo_last_block")
CALIBRATION_SPLITS = ("train", "val", "test")
BATCH_NORMS = ("reestimate", "merged")
DECODER_ROWS = ("all", "targets", "auto")
STREAM_EXPERTS = ("auto", True, False)
LINEAR_KERNELS = ("auto", "torch", "onednn")
SUMS_PRECISIONS = ("auto", "float32", "float64", "tf32", "bfloat16")
ACTIVATIONS = ("auto", "device", "host", "disk")
CALIBRATION_TARGETS = ("labels", "generated")
READ_UNITS = {"B": 1} | {
    prefix + end: base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", start=1)
}

_AMOUNT = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(READ_UNITS)}|%)")


def budget_in_bytes(budget: float | str, full: int) -> int:
    """A read budget as a number of bytes, rounded down.

    Args:
        budget: The setting `expert_read_budget`.
        full: Bytes of a full read, of which a percentage is a share.
    """
    if not isinstance(budget, str):
        return int(budget)
    number, unit = _amount(budget)
    return int(number * full / 100 if unit == "%" else number * READ_UNITS[unit])


def _amount(text: str) -> tuple[Fraction, str]:
    match = _AMOUNT.fullmatch(text)
    return (Fraction(match[1]), match[2]) if match else (Fraction(0), "")


def _is_budget_or_none(value: Any) -> bool:
    if not isinstance(value, str):
        return value is None or (is_number(value) and value >= 1 and value == int(value))
    number, unit = _amount(value)
    return number > 0 and (unit != "%" or number <= 100) and bool(unit)


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_integer(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_ridge(value: Any) -> bool:
    return is_number(value) and 0 <= value <= 1e12


def _is_text_list(value: Any) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and all(isinstance(text, str) and text for text in value)
    )


def _is_pattern_list(value: Any) -> bool:
    return value is None or (_is_text_list(value) and len(value) > 0)


def _names_class(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("_target_"), str)


def _is_augmentation(value: Any) -> bool:
    return _names_class(value) and _is_integer(value.get("copies", 1), 1)


def _are_factors(value: Any) -> bool:
    return isinstance(value, Mapping) and all(is_number(v) and v > 0 for v in value.values())


def _are_data_sets(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(v, Mapping) or (isinstance(v, str) and bool(v)) for v in value.values()
    )


def _is_folder_or_none(value: Any) -> bool:
    return value is None or (isinstance(value, str | os.PathLike) and bool(os.fspath(value)))


Check = tuple[str, Callable[[Any], bool]]
"""The accepted values of a setting in words, and their test."""


def integer(least: int) -> Check:
    """Check of an integer with a lower bound."""
    return f"an integer >= {least}", lambda value: _is_integer(value, least)


def _or_auto(least: int) -> Check:
    return (
        f"auto or an integer >= {least}",
        lambda value: value == "auto" or _is_integer(value, least),
    )


def one_of(choices: Sequence[Any]) -> Check:
    """Check of a value out of a list."""
    words = "one of " + ", ".join(str(choice) for choice in choices)
    # `1 in (True,)` holds in Python, so the type is compared too
    return words, lambda value: any(type(value) is type(c) and value == c for c in choices)


def nullable(check: Check) -> Check:
    """Check of a value that may be None."""
    return f"null or {check[0]}", lambda value: value is None or check[1](value)


def problems_of(settings: Any, checks: Mapping[str, Check]) -> list[str]:
    """A phrase for each setting that has a value it does not accept."""
    return [
        f"{name} must be {words}, got {getattr(settings, name)!r}"
        for name, (words, valid) in checks.items()
        if not valid(getattr(settings, name))
    ]


def check_fields(settings: Any, checks: Mapping[str, Check]) -> None:
    """Refuse a method's settings that have values which they do not accept.

    Raises:
        ValueError: Naming each of them.
    """
    if problems := problems_of(settings, checks):
        raise ValueError("; ".join(f"method.{problem}" for problem in problems))


POSITIVE: Check = ("a finite number > 0", lambda value: is_number(value) and value > 0)
SHARE: Check = ("a number in [0, 1]", lambda value: is_number(value) and 0 <= value <= 1)
BOOLEAN: Check = ("true or false", lambda value: isinstance(value, bool))

# Every gram has norm 1: beyond this no digit of float64 is left for the data.
_RIDGE = "a finite number >= 0 and at most 1e12"
_NON_NEGATIVE = ("a finite number >= 0", lambda value: is_number(value) and value >= 0)

_FOLDER: Check = ("null or a folder's path", _is_folder_or_none)

CHECKS: dict[str, Check] = {
    "ridge_lambda": (_RIDGE, _is_ridge),
    "mix_alpha": ("a number in [0, 1]", lambda value: is_number(value) and 0 <= value <= 1),
    "anchor_rho": (
        "a finite number from -1000 to 1000 (2 is twice as far from the base as the merged model)",
        lambda value: is_number(value) and abs(value) <= 1000,
    ),
    "eps": (_RIDGE, _is_ridge),
    "rule": (
        "paper, plus, a mapping with `_target_`, a rule's class, and its settings, or a rule",
        lambda value: value in RULES or _names_class(value) or hasattr(value, "turns"),
    ),
    "task_weights": (
        "null, drift, or a mapping of tasks to numbers above 0",
        lambda value: value in (None, "drift") or _are_factors(value),
    ),
    "augment": (
        "null, auto, jitter, or a mapping with `_target_` and, if given, `copies` >= 1",
        lambda value: value in (None, "auto", "jitter") or _is_augmentation(value),
    ),
    "held_out": _or_auto(0),
    "strict": BOOLEAN,
    "samples_per_task": integer(1),
    "batch_size": integer(1),
    "seed": integer(0),
    "calibrate_bias": BOOLEAN,
    "calibrate_norm": BOOLEAN,
    "batch_norm": one_of(BATCH_NORMS),
    "modules": ("null or a non-empty list of patterns", _is_pattern_list),
    "token_weights": one_of(TOKEN_WEIGHTS),
    "decoder_rows": one_of(DECODER_ROWS),
    "calibration_split": one_of(CALIBRATION_SPLITS),
    "calibration_data": (
        "null, or a mapping of tasks to paths, hub ids or configs of data sets",
        lambda value: value is None or _are_data_sets(value),
    ),
    "calibration_targets": one_of(CALIBRATION_TARGETS),
    "generated_tokens": integer(1),
    "max_length": nullable(integer(2)),
    "family": (
        "a family's name, a mapping with its `name` or `_target_`, or a Family",
        lambda value: value is not None and value != "",
    ),
    "ignore_config": ("a list of config keys, such as [hidden_act]", _is_text_list),
    "stream_experts": one_of(STREAM_EXPERTS),
    "expert_read_budget": (
        "null, a whole number of bytes >= 1, an amount such as 800MB or 1.5GiB (units B, KB to TB, "
        "KiB to TiB), or a share of a full read up to 100%, such as 50%",
        _is_budget_or_none,
    ),
    "log_drift": BOOLEAN,
    "linear_kernel": one_of(LINEAR_KERNELS),
    "sums_precision": one_of(SUMS_PRECISIONS),
    "activations": one_of(ACTIVATIONS),
    "activations_dir": _FOLDER,
    "checkpoint_dir": _FOLDER,
    "resume": BOOLEAN,
    "decode_workers": _or_auto(0),
    "pixel_cache_mb": _NON_NEGATIVE,
    "cache_dir": _FOLDER,
}

ACCEPTED = {name: wanted for name, (wanted, _) in CHECKS.items()}
"""Setting -> the values that it accepts, in words."""
