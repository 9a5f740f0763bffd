"""A config that cannot be composed: a misspelt setting or pool ends in one short line.

Hydra prints such errors itself, before it calls anything of ours; but not where
`HYDRA_FULL_ERROR=1` is set: there it lets them pass, to `sys.excepthook`.
"""

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.error_block import error_block

_FULL = "HYDRA_FULL_ERROR"
_MORE = f"all of Hydra's message: {_FULL}=1"
_explaining = False


def explain_config_errors(words: Sequence[str], methods: Path) -> None:
    """Explain errors of a command that runs one of our methods, until the run starts.

    Args:
        words: Words of the command line.
        methods: Folder of our methods' YAMLs.
    """
    global _explaining
    names = [word.removeprefix("method=") for word in words if word.startswith("method=")]
    ours = bool(names) and (methods / f"{names[-1]}.yaml").is_file()
    if not ours or _FULL in os.environ or _explaining:
        return
    _explaining = True
    os.environ[_FULL] = "1"
    before = sys.excepthook

    def explain(
        kind: type[BaseException], error: BaseException, place: TracebackType | None
    ) -> None:
        if _explaining and isinstance(error, HydraException | OmegaConfBaseException):
            from fusion_bench_featcal.boundary.log_dir import is_helper

            if not is_helper(os.environ):  # the first process speaks for all
                print(error_block(explained(error), _MORE), file=sys.stderr)
        else:
            before(kind, error, place)

    sys.excepthook = explain


def stop_explaining() -> None:
    """Leave everything to Hydra again: the config is composed."""
    global _explaining
    if _explaining:
        os.environ.pop(_FULL, None)
    _explaining = False


class _ConfigError(ValueError):
    """A mistake in the words of a command."""


def explained(error: BaseException) -> ValueError:
    """An error of composing a config in fewer words, with the nearest name that exists.

    Args:
        error: Hydra's or OmegaConf's.
    """
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        near = _nearest(Path(error.missing_cfg_file).name, error.options or ())
        return _ConfigError(f"there is no config {error.missing_cfg_file}{near}")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        parent = cause.parent_node
        keys = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
        if cause.key not in keys:
            return _ConfigError(f"{cause.full_key} is no setting{_nearest(str(cause.key), keys)}")
    return _ConfigError(" ".join(f"{error} {cause or ''}".split()))


def _nearest(name: str, valid: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, valid, n=1)
    return f" (nearest: {near[0]!r})" if near else ""
