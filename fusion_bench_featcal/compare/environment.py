"""With what and on what a run was made."""

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .names import UNAVAILABLE

PACKAGES = (
    "fusion-bench-featcal",
    "fusion-bench",
    "torch",
    "transformers",
    "lightning",
    "hydra-core",
    "datasets",
    "numpy",
)


def versions() -> dict[str, str]:
    """Return Python's version and those of the packages that decide numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def describe_device(device: Any = "cpu") -> dict[str, Any]:
    """Describe the machine a run computed on.

    Args:
        device: The device in use, for example `fabric.device`, "cpu" or "cuda:0".

    Returns:
        `device`, `accelerator` (its marketing name, "none" on CPU), `cpu`, `cpu_cores` usable by
        this process, `torch_threads`, `platform`; "unavailable" for what cannot be found out.
    """
    torch = sys.modules.get("torch")
    name = str(device)
    accelerator = "none"
    if not name.startswith("cpu"):
        cuda = torch is not None and name.startswith("cuda") and torch.cuda.is_available()
        accelerator = torch.cuda.get_device_name(device) if torch and cuda else UNAVAILABLE
    return {
        "device": name,
        "accelerator": accelerator,
        "cpu": _cpu_model(),
        "cpu_cores": _usable_cores(),
        "torch_threads": torch.get_num_threads() if torch is not None else UNAVAILABLE,
        "platform": f"{platform.system()} {platform.machine()}",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or UNAVAILABLE


def _usable_cores() -> int | str:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or UNAVAILABLE
