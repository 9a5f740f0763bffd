"""Screen of a run: few lines, with everything in the log file and a mistake in one line.

The methods' YAMLs choose the logging configuration `config/hydra/job_logging/featcal.yaml`, which
contains the callback `FeatCalJob`. With another logging configuration, such as
`hydra/job_logging=rich_logging`, the screen is FusionBench's.
"""

import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.utils import JobReturn
from hydra.errors import HydraException, MissingConfigException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from fusion_bench_featcal.errors import CalibrationError
from fusion_bench_featcal.errors.block import error_block
from fusion_bench_featcal.errors.masking import hide, masked
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.signals import Interruption, exit_code, raise_interruptions
from fusion_bench_featcal.errors.words import Vocabulary, set_vocabulary, using_vocabulary
from fusion_bench_featcal.files import write_atomic

FULL_ERROR = "HYDRA_FULL_ERROR"
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
# transformers reports on every CLIP that its text tower is UNEXPECTED in a vision model.
_NEEDLESS = re.compile(
    r"Using a slow image processor|(?s:(?=.* LOAD REPORT)(?!.*(MISSING|MISMATCH|CONVERSION)))"
)
_SWITCHES = ("print_config", "print_function_call")
_OF_CELLS = "Repeat the command to continue after the finished runs"
_OF_BLOCKS = (
    "With method.checkpoint_dir and method.resume=true, a run continues after its last finished "
    "block"
)
WORDS = Vocabulary("method.", {
    "rule=plus": "method=featcal/plus", "rule=paper": "method=featcal",
    "float32": "models that are stored or loaded in it, and fabric.precision=32-true",
    "processes": " (fabric.devices, fabric.num_nodes)", "swudi": "method=featcal_mergers/swudi",
})  # fmt: skip
"""Names of settings in messages of packages that are not specific to FusionBench."""


class FeatCalJob(Callback):
    """Checks a run's config, switches FusionBench's prints off, and prints a mistake in one line.

    `_target_` may name modules in the current folder. Only the first of several processes has a log
    directory and prints.
    """

    def __init__(self) -> None:
        """Create the callback after the config is composed."""
        set_vocabulary(WORDS)

    def on_run_start(self, config: DictConfig, **kwargs: object) -> None:
        """Check the config before FusionBench builds anything from it.

        Raises:
            SystemExit: If a name or value is wrong.
        """
        from fusion_bench_featcal.fusionbench.config_checks import check_config
        from fusion_bench_featcal.fusionbench.program_processes import open_fabric

        make_importable(os.getcwd())
        explain_interruptions(config.method)
        # FusionBench's YAML sets 1, which processes of the job would take for the user's choice.
        config.hydra.job.env_set[FULL_ERROR] = os.environ.get(FULL_ERROR, "0")
        if is_helper(os.environ):  # the time in the folder's name would differ
            with open_dict(config.hydra):
                config.hydra.run.dir, config.hydra.output_subdir = ".", None
                config.hydra.job_logging.handlers.file = {"class": "logging.NullHandler"}
        names = {str(word).lstrip("+").partition("=")[0] for word in config.hydra.overrides.task}
        wanted_prints = {*names, "print_config"} if config.get("dry_run") else names
        for name in set(_SWITCHES) - wanted_prints:
            config[name] = False
        try:
            check_config(config)
            open_fabric(config.get("fabric"))
        except (ValueError, CalibrationError) as error:
            text = masked(f"error: {error}")
            raise SystemExit(1 if is_helper(os.environ) else text) from error

    def on_multirun_start(self, config: DictConfig, **kwargs: object) -> None:
        """Switch FusionBench's prints off in every job of a sweep.

        Raises:
            SystemExit: If a key at the root is unknown, or a setting belongs to another rule.
        """
        from fusion_bench_featcal.fusionbench.config_checks import (
            check_root_keys,
            refuse_settings_of_other_rules,
        )

        overrides = [str(word) for word in config.hydra.overrides.task]
        matches = (re.match(r"\W*(\w+)", override) for override in overrides)
        try:
            check_root_keys((match[1] for match in matches if match), config)
            refuse_settings_of_other_rules(overrides, config.method)
        except ValueError as error:
            raise SystemExit(f"error: {error}") from error
        make_importable(os.getcwd())
        explain_interruptions(config.method)
        switched_off = [f"{name}=false" for name in _SWITCHES]
        config.hydra.overrides.task = [*switched_off, *config.hydra.overrides.task]

    def on_job_start(self, config: DictConfig, **kwargs: object) -> None:
        """Hide private texts, and adapt FusionBench before it builds the pools."""
        set_vocabulary(WORDS)  # a job of a sweep may have a process of its own
        hide_private_texts(config)
        import fusion_bench_featcal.fusionbench.compat  # noqa: F401, I001
        from fusion_bench.utils.instantiate_utils import set_print_function_call_permeanent
        from transformers.utils.logging import disable_progress_bar

        if not sys.stderr.isatty():
            disable_progress_bar()  # a line for each model that is loaded
        # FusionBench 0.2.33 does not read the switch.
        set_print_function_call_permeanent(bool(config.print_function_call))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: object) -> None:
        """Replace a mistake by one line. Its traceback is only in the log file.

        A bug keeps its traceback on the screen. Python prints the text of a `SystemExit` at the
        end, and exits with 1. If Hydra runs several jobs, it runs the other jobs first.
        """
        error = job_return._return_value
        if not isinstance(error, Exception) or os.environ.get(FULL_ERROR) == "1":
            return
        text = error_block(error)
        if is_helper(os.environ):
            job_return.return_value = SystemExit(1)
        elif not text.startswith("error: unexpected"):
            job_return.return_value = SystemExit(f"\n{text}")

    def on_run_end(self, config: DictConfig, *, job_return: JobReturn, **kwargs: object) -> None:
        """End a failed run here, because Hydra would print all overrides first."""
        if isinstance(job_return._return_value, SystemExit):
            raise job_return._return_value


class ScreenFilter(logging.Filter):
    """Passes records of the first process, except for FusionBench's steps and tracebacks."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        is_error_of_the_run = record.exc_info and record.exc_info[1] is record.msg
        if record.name.startswith("fusion_bench.") or is_error_of_the_run:
            return False
        if _NEEDLESS.match(str(record.msg)):
            return False
        return record.levelno > logging.INFO or not is_helper(os.environ)


class MaskingFormatter(logging.Formatter):
    """Formats records and tracebacks without private texts."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as text."""
        return masked(super().format(record))


def hide_private_texts(config: DictConfig) -> None:
    """Mask private texts of the pools in messages and in the files that Hydra wrote for a job."""
    from fusion_bench_featcal.fusionbench.run_settings import POOLS, plain_config

    parts = [config[name] for name in POOLS if config.get(name) is not None]
    written = [OmegaConf.to_container(part) for part in parts]  # as in Hydra's files
    with suppress(OmegaConfBaseException):  # an interpolation, which fails later
        written += [plain_config(part) for part in parts]
    hide(written)
    hydra = config.hydra
    files = [Path(hydra.sweep.dir, "multirun.yaml")] * (hydra.mode == RunMode.MULTIRUN)
    if hydra.output_subdir is not None:
        names = ("config.yaml", "hydra.yaml", "overrides.yaml")
        files += [Path(hydra.runtime.output_dir, hydra.output_subdir, name) for name in names]
    for file in filter(Path.exists, files):
        text = file.read_text("utf-8")
        if (new := masked(text)) != text:
            write_atomic(file, new)


def is_helper(environment: Mapping[str, str]) -> bool:
    """Return whether Fabric, torchrun or Slurm started this process in addition to a first one."""
    rank = next((environment[name] for name in _RANKS if name in environment), "0")
    return int(rank) > 0 or int(environment.get("NODE_RANK", "0")) > 0


def make_importable(folder: str) -> None:
    """Append a folder to the import path, unless Python was started with `-P`."""
    if not sys.flags.safe_path and folder not in sys.path:
        sys.path.append(folder)


def explain_interruptions(method: Mapping[str, Any]) -> None:
    """Print how to continue instead of a traceback, if Ctrl-C or a signal interrupts a method.

    Python's hook for uncaught errors is the only place for this: FusionBench's command catches
    nothing, and Hydra calls no callback after a KeyboardInterrupt.
    """
    before = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if not isinstance(error, KeyboardInterrupt):
            before(kind, error, trace)
            return
        if not is_helper(os.environ):
            advice = [_OF_CELLS] * ("post_merging" in method) or [_OF_BLOCKS] * ("resume" in method)
            print("\n" + ". ".join(["interrupted", *advice]), file=sys.stderr)
        if isinstance(error, Interruption):  # Python has exit codes for Ctrl-C alone
            sys.stdout.flush()
            os._exit(exit_code(error))

    sys.excepthook = explain
    raise_interruptions()


def explain_config_errors() -> None:
    """End a command in one line if Hydra cannot compose its config.

    Hydra has no hook for such errors: its plugins run before a config is composed, and its
    callbacks afterwards. So its method that loads a config is wrapped.
    """
    load = ConfigLoaderImpl.load_configuration

    @wraps(load)
    def load_or_exit(*args: Any, validate_sweep_overrides: bool = True, **options: Any) -> Any:
        try:
            return load(*args, validate_sweep_overrides=validate_sweep_overrides, **options)
        except (HydraException, OmegaConfBaseException) as error:
            # Without validation Hydra only reads the mode, and ignores errors.
            if not validate_sweep_overrides or os.environ.get(FULL_ERROR) == "1":
                raise
            raise SystemExit(masked(f"error: {explained(error)}")) from error

    ConfigLoaderImpl.load_configuration = load_or_exit  # type: ignore[method-assign]


@using_vocabulary(WORDS)
def explained(error: BaseException) -> ValueError:
    """Return a shorter error of composing a config, with the nearest existing name."""
    from fusion_bench_featcal.fusionbench.config_checks import (
        check_root_keys,
        refuse_settings_of_other_rules,
    )

    cause = error.__cause__
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = error.missing_cfg_file.partition("/")
        # Hydra's error leaves out this package's configs in subfolders.
        package = Path(__file__).parents[1]
        folders = (package / "config" / group, package.parent / "config" / group)
        files = (file.relative_to(f).with_suffix("") for f in folders for file in f.rglob("*.yaml"))
        hint = nearest_hint(name, [*(error.options or ()), *(file.as_posix() for file in files)])
        return ValueError(f"there is no config {error.missing_cfg_file}{hint}")
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        root = cause.parent_node
        try:
            if cause.full_key == cause.key and "method" in (root or ()):
                check_root_keys([str(cause.key)], root)
            if cause.full_key == f"method.{cause.key}":
                refuse_settings_of_other_rules(str(error).split("+")[-1:], root)
        except ValueError as named:
            return named
        hint = nearest_hint(cause.key, root or ())
        added = f". To add it, write +{cause.full_key}=..."
        return ValueError(f"{cause.full_key} is unknown{hint or added}")
    return ValueError(" ".join(f"{error} {cause or ''}".split()))
