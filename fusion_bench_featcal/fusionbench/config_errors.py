"""Errors in composing a config, shown in one line with the nearest existing name."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.errors.nearest_names import nearest_hint

FULL_ERROR = "HYDRA_FULL_ERROR"
_hook_before: Any = None


def explain_config_errors(words: Sequence[str], methods: Path) -> None:
    """Explain errors of a command that runs one of our methods, until its config is composed.

    Args:
        words: Words of the command line.
        methods: Folder of our methods' YAMLs.
    """
    global _hook_before
    name = next((w.removeprefix("method=") for w in words[::-1] if w.startswith("method=")), "")
    if (methods / f"{name}.yaml").is_file() and os.environ.get(FULL_ERROR) != "1":
        os.environ[FULL_ERROR] = "1"  # Hydra then leaves its errors to the hook
        _hook_before, sys.excepthook = sys.excepthook, _explain


def stop_explaining() -> None:
    """Restore the error handling of Hydra and Python."""
    global _hook_before
    if _hook_before is not None:
        os.environ.pop(FULL_ERROR, None)
        sys.excepthook, _hook_before = _hook_before, None


def _explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if isinstance(error, HydraException | OmegaConfBaseException):
        text = f"error: {explained(error)}\nall of Hydra's message: {FULL_ERROR}=1"
        print(text, file=sys.stderr)
    else:
        _hook_before(kind, error, trace)


def explained(error: BaseException) -> ValueError:
    """Return a shorter error of composing a config, with the nearest existing name."""
    cause: Any = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        name = error.missing_cfg_file.partition("/")[2]
        hint = nearest_hint(name, error.options or ())
        return ValueError(f"there is no config {error.missing_cfg_file}{hint}")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        hint = nearest_hint(cause.key, cause.parent_node or ())
        return ValueError(f"{cause.full_key} is unknown{hint}")
    return ValueError(" ".join(f"{error} {cause or ''}".split()))
