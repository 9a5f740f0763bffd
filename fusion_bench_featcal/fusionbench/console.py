"""Screen and log directory of a run: few lines on the screen, everything in the log file.

`config/featcal_callback/run.yaml`, which the methods' YAMLs include, selects the callback and the
logging configuration `config/hydra/job_logging/featcal.yaml`. Other methods and other Hydra
programs include neither. `method.debug=true`, `HYDRA_FULL_ERROR=1` and `hydra.verbose=true` show
everything on the screen.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, redirect_stdout
from functools import partialmethod
from typing import Any, ClassVar

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict
from tqdm.std import tqdm

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.block import error_block
from fusion_bench_featcal.files import prepare_directory
from fusion_bench_featcal.fusionbench.config_errors import FULL_ERROR, stop_explaining

log = logging.getLogger(__name__)

# Loggers whose INFO goes to the log file only.
_CHATTY = ("fusion_bench.", "lightning", "httpx", "datasets", "huggingface_hub")
# Unused keys of a pool, and transformers' report on every CLIP: its text tower is UNEXPECTED in a
# vision model.
_NEEDLESS = re.compile(
    r"Unused argument: (default_taskpool|featcal|base_model)=|Using a slow image processor"
    r"|(?s:(?=.* LOAD REPORT)(?!.*(MISSING|MISMATCH|CONVERSION)))"
)
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")

_waiting: list[Callable[[], object]] | None = None  # results of the running job


def at_the_end(show: Callable[[], object]) -> None:
    """Show results below everything else when the job ends, or at once outside a job."""
    if _waiting is None:
        show()
    else:
        _waiting.append(show)


def is_helper(environment: Mapping[str, str]) -> bool:
    """Return whether Fabric, torchrun or Slurm started this process in addition to a first one."""
    rank = next((environment[name] for name in _RANKS if name in environment), "0")
    return int(rank) > 0 or int(environment.get("NODE_RANK", "0")) > 0


def make_importable(folder: str) -> None:
    """Append a folder to the import path, unless Python was started with `-P`."""
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)


def _shows_everything(debug: Any) -> bool:
    verbose = logging.getLogger().level == logging.DEBUG  # hydra.verbose=true
    return debug is True or verbose or os.environ.get(FULL_ERROR) == "1"


class ScreenFilter(logging.Filter):
    """Passes this package's lines, and warnings that need the user's attention.

    Attributes:
        logged_error: The last error whose traceback is in the log file only.
    """

    logged_error: ClassVar[object] = None

    def __init__(self, debug: Any = False) -> None:
        """Take the setting `method.debug`."""
        super().__init__()
        self._debug = debug

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        if _shows_everything(self._debug):
            return True
        if record.exc_info and record.exc_info[1] is record.msg:
            ScreenFilter.logged_error = record.msg
            return False
        if record.levelno > logging.INFO:
            return not _NEEDLESS.match(str(record.msg))
        is_chatty = record.levelno < logging.INFO or record.name.startswith(_CHATTY)
        return not (is_chatty or is_helper(os.environ))


class FeatCalJob(Callback):
    """Prepares a run's log directory, keeps its screen short and ends a failed run in one block.

    Modules in the current folder can be named by `_target_`. Only the first of several processes
    has a log directory and prints.
    """

    def __init__(self) -> None:
        """Create the callback after the config is composed."""
        stop_explaining()
        self._stack, self._full = ExitStack(), True

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Create the log directory. Hydra would do so later, with a worse error message.

        Raises:
            SystemExit: If it cannot be created or written.
        """
        make_importable(os.getcwd())
        if is_helper(os.environ):  # the time in the folder's name would differ
            with open_dict(config.hydra):
                config.hydra.run.dir, config.hydra.output_subdir = ".", None
                config.hydra.job_logging.handlers.file = {"class": "logging.NullHandler"}
            return
        HydraConfig.instance().set_config(config)  # the folder's name needs it
        try:
            prepare_directory(config.hydra.run.dir)
        except ReportError as error:
            raise SystemExit(error_block(error)) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Redirect FusionBench's prints to the log file."""
        global _waiting
        import fusion_bench_featcal.fusionbench.compat  # noqa: F401  # before FusionBench makes the pools

        _waiting = []
        self._full = _shows_everything((config.get("method") or {}).get("debug"))
        # Unresolved, because a word may contain an invalid interpolation.
        words: Any = OmegaConf.to_container(config.hydra.overrides.task)
        arguments = {str(word).lower() for word in words}
        if self._full or config.get("dry_run") or "print_function_call=true" in arguments:
            return
        if "print_config=true" in arguments:
            from fusion_bench.utils.rich_utils import print_config_tree

            shown_config = OmegaConf.masked_copy(config, [str(k) for k in config if k != "hydra"])
            print_config_tree(shown_config, print_order=["method", "modelpool", "taskpool"])
        file = _log_file()
        devnull = self._stack.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        self._stack.enter_context(redirect_stdout(file.stream if file else devnull))
        if not sys.stderr.isatty():
            # FusionBench's bars have no switch, and print a line per update into a file.
            self._stack.callback(setattr, tqdm, "__init__", tqdm.__init__)
            tqdm.__init__ = partialmethod(tqdm.__init__, disable=None)  # type: ignore[assignment]

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Show the results, and replace an error by its block.

        Python prints the text of a `SystemExit` last, and exits with 1. If Hydra runs several jobs,
        the other jobs come first.
        """
        global _waiting
        results, _waiting = _waiting or [], None
        self._stack.close()
        sys.stderr.flush()
        for show in results:
            show()
        error = job_return._return_value
        if not self._full and isinstance(error, Exception):
            if ScreenFilter.logged_error is not error:  # FusionBench only logs errors of its run
                log.error(error, exc_info=error)
            file = _log_file()
            log_location = f"{file.baseFilename}, or on the screen with " if file else ""
            block = f"{error_block(error)}\ntraceback: {log_location}method.debug=true"
            job_return.return_value = SystemExit(1 if is_helper(os.environ) else f"\n{block}")
        sys.stdout.flush()

    def on_run_end(self, config: DictConfig, *, job_return: JobReturn, **kwargs: Any) -> None:
        """End a failed run here, because Hydra would print all overrides first."""
        if isinstance(job_return._return_value, SystemExit):
            raise job_return._return_value


def _log_file() -> logging.FileHandler | None:
    handlers = logging.getLogger().handlers
    return next((h for h in handlers if isinstance(h, logging.FileHandler)), None)
