"""A Hydra job: its log directory, checked before Hydra makes it, and results, shown at its end."""

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict

from fusion_bench_featcal.error_block import error_block
from fusion_bench_featcal.files import ReportError, prepare_directory

Show = Callable[[], object]
"""Prints results."""

_waiting: list[Show] | None = None  # results of the job that is under way
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def at_the_end(show: Show) -> bool:
    """Show something at the end of the job; return False where none with our callback runs."""
    if _waiting is not None:
        _waiting.append(show)
    return _waiting is not None


class LogDirectoryCheck(Callback):
    """Refuses a log directory that cannot be made or written; shows results when a job ends.

    Classes in the folder where the command is run can be named by `_target_`.

    A pool of language models without a tokenizer, which FusionBench cannot even make, is given
    `tokenizer: null`: the method then says what is missing.

    Of several processes only the first one keeps a log directory: its default name holds the time,
    which others would read a second later.
    """

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Make the log directory, as Hydra would a moment later; or see that there is none.

        Raises:
            SystemExit: If a file is in its place or it cannot be written; Hydra would only warn.
        """
        _name_no_tokenizer(config)
        make_importable(os.getcwd())
        if is_helper(os.environ):
            _log_to_console_only(config)
            return
        # The folder's default name holds the time, which needs Hydra's own config; Hydra sets it
        # itself a moment later.
        HydraConfig.instance().set_config(config)
        try:
            prepare_directory(config.hydra.run.dir)
        except ReportError as error:
            raise SystemExit(error_block(error)) from error

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Let results wait for the end of the job."""
        global _waiting
        _waiting = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Show the results, below everything that FusionBench printed."""
        global _waiting
        shows, _waiting = _waiting or [], None
        sys.stderr.flush()
        for show in shows:
            show()
        sys.stdout.flush()


def make_importable(folder: str) -> None:
    """Let modules in a folder be imported, after all others; not with `python -P`."""
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)


def is_helper(environment: Mapping[str, str]) -> bool:
    """Return whether Fabric, torchrun or Slurm says that this process is not the first one."""
    own = next((environment[name] for name in _RANKS if name in environment), "0")
    return int(own) > 0 or int(environment.get("NODE_RANK", "0")) > 0


def _name_no_tokenizer(config: DictConfig) -> None:
    pool = config.get("modelpool")
    if isinstance(pool, DictConfig) and str(pool.get("_target_")).endswith(
        ("CausalLMPool", "Seq2SeqLMPool")
    ):
        with open_dict(pool):
            pool.tokenizer = pool.get("tokenizer")


def _log_to_console_only(config: DictConfig) -> None:
    """Let Hydra make no folder and no file."""
    with open_dict(config.hydra):
        config.hydra.run.dir = "."
        config.hydra.output_subdir = None
        logging = config.hydra.job_logging
        handlers, root = logging.get("handlers") or {}, logging.get("root") or {}
        files = [name for name, handler in handlers.items() if "filename" in handler]
        for name in files:
            del handlers[name]
        if "handlers" in root:
            root["handlers"] = [name for name in root["handlers"] if name not in files]
