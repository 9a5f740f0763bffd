"""The screen while one of this package's methods runs: few lines, and errors as a short block.

Hydra calls `Console`, which the methods' YAMLs bring. Other methods run as they always do.
"""

import copy
import difflib
import functools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.logging import RichHandler
from tqdm.std import tqdm

from fusion_bench_featcal.error_block import error_block
from fusion_bench_featcal.fusionbench.hydra_job import is_helper
from fusion_bench_featcal.nearest_names import nearest_hint

log = logging.getLogger(__name__)


_CHATTY = ("fusion_bench.", "lightning", "httpx", "datasets", "huggingface_hub")
"""Loggers whose INFO goes to the log file only."""

_MARK = "FEATCAL_QUIET"
"""Environment variable that a quiet job sets."""

_NEEDLESS = (
    "Unused argument: default_taskpool=",  # keys of a model pool that are read from the config
    "Unused argument: featcal=",
    "Unused argument: base_model=",  # key of a stock pool to which its other keys refer
    "Using a slow image processor",
)
"""Beginnings of warnings that ask nothing of the user."""

_LOADED_WRONGLY = ("MISSING", "MISMATCH", "CONVERSION")
"""Statuses in a load report of transformers that someone should see; UNEXPECTED is not one."""


class Console(Callback):
    """Quietens FusionBench, and ends a failed run in one block instead of two tracebacks.

    What is kept from the screen stays in the run's log file. `method.debug=true`,
    `HYDRA_FULL_ERROR=1` and `hydra.verbose=true` show everything.
    """

    def __init__(self) -> None:
        """Begin, before Hydra runs anything."""
        stop_explaining()
        # FusionBench sets it for a quiet job too, whose processes hand it on to those they start.
        self._full = os.environ.get("HYDRA_FULL_ERROR") == "1" and _MARK not in os.environ
        self._quiet: Quiet | None = None

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        """Keep from the screen what only repeats the config; let FusionBench's pools import."""
        method = config.get("method") or {}
        ours = str(method.get("_target_")).startswith("fusion_bench_featcal.")
        if ours:  # the program makes the model pool before it imports the method
            import fusion_bench_featcal.compat  # noqa: F401
        if ours and not (self._full or method.get("debug") is True or config.hydra.verbose):
            # Unresolved: a word may hold an interpolation that leads nowhere.
            words: Any = OmegaConf.to_container(config.hydra.overrides.task)
            asked = [str(word).lower() for word in words]
            if config.get("dry_run"):  # which is there to show the config
                asked.append("print_config=true")
            self._quiet = Quiet(asked)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Put an error's block in the place of the error.

        Python prints what a `SystemExit` holds as the last thing of all, and exits with 1; where
        Hydra runs several jobs, the others come first.
        """
        quiet, self._quiet = self._quiet, None
        if quiet is None:
            return
        error = job_return._return_value
        if job_return.status == JobStatus.FAILED and isinstance(error, Exception):
            if quiet.hidden is not error:  # FusionBench logs what fails while its program runs
                log.error(error, exc_info=error)
            # Each of several processes fails; the first one speaks for all.
            silent = is_helper(os.environ)
            block = "\n" + error_block(error, _more())  # apart from a table above it
            job_return.return_value = SystemExit(1 if silent else block)
        quiet.end()
        sys.stdout.flush()

    def on_run_end(self, config: DictConfig, *, job_return: JobReturn, **kwargs: Any) -> None:
        """End a failed run here: Hydra would first print all overrides."""
        if isinstance(job_return._return_value, SystemExit):
            raise job_return._return_value


class Quiet(logging.Filter):
    """Keeps the screen to this package's own lines, until `end`.

    Attributes:
        hidden: The error whose traceback was kept from the screen.
    """

    def __init__(self, asked: Sequence[str]) -> None:
        """Begin."""
        super().__init__()
        self.hidden: object = None
        self._undo: list[Callable[[], object]] = []
        self._silence_fusion_bench(asked)
        self._shorten_log()
        os.environ[_MARK] = "1"
        self._undo.append(lambda: os.environ.pop(_MARK, None))
        if not sys.stderr.isatty():
            # FusionBench's bars have no switch, and print a line an update into a file.
            hidden = functools.partialmethod(tqdm.__init__, disable=None)
            self._replace(tqdm, "__init__", hidden)

    def end(self) -> None:
        """Let everything be as it was."""
        for undo in reversed(self._undo):
            undo()

    def filter(self, record: logging.LogRecord) -> bool:
        """Tell whether a record is shown on the screen."""
        if record.exc_info and record.exc_info[1] is record.msg:
            self.hidden = record.msg
            return False
        if record.levelno > logging.INFO:
            return not _is_needless(str(record.msg))
        return not record.name.startswith(_CHATTY)

    def _silence_fusion_bench(self, asked: Sequence[str]) -> None:
        from fusion_bench.mixins import SimpleProfilerMixin
        from fusion_bench.programs import fabric_fusion_program
        from fusion_bench.utils import instantiate_utils

        # Here and not by the switches in the config: Hydra has copied it, and its
        # `print_function_call` never reaches the functions that print.
        if "print_config=true" not in asked:
            self._replace(fabric_fusion_program, "print_config_tree", _print_nothing)
        if "print_function_call=true" not in asked:
            self._replace(instantiate_utils, "PRINT_FUNCTION_CALL", False)
        self._replace(SimpleProfilerMixin, "print_profile_summary", _print_nothing)

    def _shorten_log(self) -> None:
        """Filter what reaches the screen, in lines that leave room for the message."""
        root = logging.getLogger()
        for handler in list(root.handlers):
            if isinstance(handler, logging.FileHandler):
                continue
            if type(handler) is RichHandler:
                short = RichHandler(handler.level, show_path=False, log_time_format="%H:%M:%S")
                short.setFormatter(_WithoutTraceback())
                others = [short if other is handler else other for other in root.handlers]
                self._replace(root, "handlers", others)
                handler = short
            self._filter(handler)
        for handler in logging.getLogger("transformers").handlers:  # it prints by itself
            self._filter(handler)

    def _filter(self, handler: logging.Handler) -> None:
        handler.addFilter(self)
        self._undo.append(lambda: handler.removeFilter(self))

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner)[name]
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, before))


def _is_needless(message: str) -> bool:
    if " LOAD REPORT" in message:  # transformers 5 lists a CLIP's text tower for each vision model
        return not any(status in message for status in _LOADED_WRONGLY)
    return message.startswith(_NEEDLESS)


class _WithoutTraceback(logging.Formatter):
    """The message alone; the log file has the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        message = copy.copy(record)
        message.exc_info = message.exc_text = None
        return super().format(message)


def _print_nothing(*args: Any, **kwargs: Any) -> None: ...


def _more() -> str:
    files = [h for h in logging.getLogger().handlers if isinstance(h, logging.FileHandler)]
    place = f"{files[0].baseFilename}, or on the screen with " if files else ""
    return f"traceback: {place}method.debug=true"


_FULL = "HYDRA_FULL_ERROR"
_MORE_FOLDERS = ("--config-dir", "-cd", "hydra.searchpath")
_MORE = f"all of Hydra's message: {_FULL}=1"
_explaining = False


def explain_config_errors(words: Sequence[str], methods: Path, others: Sequence[Path] = ()) -> None:
    """Explain errors of a command that runs one of our methods, until the run starts.

    Args:
        words: Words of the command line.
        methods: Folder of our methods' YAMLs.
        others: Other folders that have configs of methods, in `method`.
    """
    global _explaining
    if not runs_ours(words, methods, others) or _FULL in os.environ or _explaining:
        return
    _explaining = True
    os.environ[_FULL] = "1"
    before = sys.excepthook

    def explain(
        kind: type[BaseException], error: BaseException, place: TracebackType | None
    ) -> None:
        if _explaining and isinstance(error, HydraException | OmegaConfBaseException):
            if not is_helper(os.environ):  # the first process speaks for all
                print(error_block(explained(error), _MORE), file=sys.stderr)
        else:
            before(kind, error, place)

    sys.excepthook = explain


def runs_ours(words: Sequence[str], methods: Path, others: Sequence[Path]) -> bool:
    """Tell whether the words name a method of ours, or misspell one such as `study/samples`."""
    name = next((w.removeprefix("method=") for w in words[::-1] if w.startswith("method=")), "")
    if "/" not in name or (methods / f"{name}.yaml").is_file():
        return bool(name) and (methods / f"{name}.yaml").is_file()
    # Misspelt only if it cannot compose: nothing would end the explaining of another method's run.
    if not others or "," in name or any(word.startswith(_MORE_FOLDERS) for word in words):
        return False
    ours = [place.name for place in methods.iterdir() if place.is_dir()]
    theirs = any((folder / "method" / f"{name}.yaml").is_file() for folder in others)
    return not theirs and bool(nearest_hint(name.partition("/")[0], ours))


def stop_explaining() -> None:
    """Leave everything to Hydra again: the config is composed."""
    global _explaining
    if _explaining:
        os.environ.pop(_FULL, None)
    _explaining = False


class _ConfigError(ValueError):
    """A mistake in the words of a command."""


def explained(error: BaseException) -> ValueError:
    """An error of composing a config in fewer words, with the nearest name that exists."""
    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        hint = _config_hint(error.missing_cfg_file, error.options or ())
        return _ConfigError(f"there is no config {error.missing_cfg_file}{hint}")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        parent = cause.parent_node
        keys = [str(key) for key in parent] if isinstance(parent, DictConfig) else []
        if cause.key not in keys:
            return _ConfigError(f"{cause.full_key} is no setting{nearest_hint(cause.key, keys)}")
    return _ConfigError(" ".join(f"{error} {cause or ''}".split()))


def _config_hint(missing: str, options: Sequence[str]) -> str:
    """The config nearest to a missing one; of one in a folder, all that the folder holds."""
    group, _, name = missing.partition("/")
    if "/" not in name:
        return nearest_hint(name, options)
    from fusion_bench.utils.hydra_utils import get_default_config_path

    # Hydra's options are those of the group itself, not of its folders.
    with initialize_config_dir(str(get_default_config_path()), version_base=None):
        loader = GlobalHydra.instance().config_loader()
        names = [known.removeprefix(f"{group}/") for known in _configs_below(loader, group)]
    by_folder: dict[str, list[str]] = {}
    for known in names:
        by_folder.setdefault(known.rpartition("/")[0], []).append(known.rpartition("/")[2])
    near = difflib.get_close_matches(name.rpartition("/")[0], by_folder, n=1)
    listed = f"; {group}/{near[0]} has {', '.join(by_folder[near[0]])}" if near else ""
    return nearest_hint(name, names) + listed


def _configs_below(loader: ConfigLoader, group: str) -> Iterator[str]:
    """Names of all configs of a group, with those in its folders."""
    for name in loader.get_group_options(group, ObjectType.CONFIG):
        yield f"{group}/{name}"
    for folder in loader.get_group_options(group, ObjectType.GROUP):
        yield from _configs_below(loader, f"{group}/{folder}")
