"""Errors of composing a config, in few words and with the nearest name that exists."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.error_block import error_block
from fusion_bench_featcal.nearest_names import nearest_hint

FULL_ERROR = "HYDRA_FULL_ERROR"
_hook_before: Any = None


def explain_config_errors(words: Sequence[str], methods: Path) -> None:
    """Explain errors of a command that runs one of our methods, until its config is composed.

    Args:
        words: Words of the command line.
        methods: Folder of our methods' YAMLs.
    """
    global _hook_before
    if runs_ours(words, methods) and os.environ.get(FULL_ERROR) != "1":
        os.environ[FULL_ERROR] = "1"  # Hydra then leaves its errors to the hook
        _hook_before, sys.excepthook = sys.excepthook, _explain


def stop_explaining() -> None:
    """Leave errors to Hydra and Python again."""
    global _hook_before
    if _hook_before is not None:
        os.environ.pop(FULL_ERROR, None)
        sys.excepthook, _hook_before = _hook_before, None


def runs_ours(words: Sequence[str], methods: Path) -> bool:
    """Return whether the words name a method of ours, or misspell one such as `study/samples`."""
    name = next((w.removeprefix("method=") for w in words[::-1] if w.startswith("method=")), "")
    folder = name.rpartition("/")[0]
    return (methods / f"{name}.yaml").is_file() or bool(folder and (methods / folder).is_dir())


def _explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    if isinstance(error, HydraException | OmegaConfBaseException):
        more = f"all of Hydra's message: {FULL_ERROR}=1"
        print(error_block(explained(error), more), file=sys.stderr)
    else:
        _hook_before(kind, error, trace)


class _ConfigError(ValueError):
    """A mistake in the words of a command."""


def explained(error: BaseException) -> ValueError:
    """Return an error of composing a config in fewer words, with the nearest name that exists."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.partition("/")
        hint = nearest_hint(name, _names_in(group))
        return _ConfigError(f"there is no config {error.missing_cfg_file}{hint}")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        parent = cause.parent_node
        keys = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
        if cause.key not in keys:
            return _ConfigError(f"{cause.full_key} is no setting{nearest_hint(cause.key, keys)}")
    return _ConfigError(" ".join(f"{error} {cause or ''}".split()))


def _names_in(group: str) -> list[str]:
    """Return the names of a group's configs, with those in its folders."""
    from fusion_bench.utils.hydra_utils import get_default_config_path

    def below(loader: ConfigLoader, folder: str) -> list[str]:
        names = [f"{folder}/{name}" for name in loader.get_group_options(folder, ObjectType.CONFIG)]
        for inner in loader.get_group_options(folder, ObjectType.GROUP):
            names += below(loader, f"{folder}/{inner}")
        return names

    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        return [name.removeprefix(f"{group}/") for name in below(loader, group)]
