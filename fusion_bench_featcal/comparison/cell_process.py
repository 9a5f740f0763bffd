"""A cell of a comparison in a process of its own, so that its costs are its own."""

import subprocess
import sys
import tempfile

from hydra.core.hydra_config import HydraConfig

from fusion_bench_featcal.settings import CalibrationError

SETTING = "process_per_cell"
_PROGRAM = "fusion_bench.scripts.cli"
_SHOWN = 2000  # characters of a failed process's last words


def check_command() -> None:
    """Refuse processes of cells where there is no command to repeat.

    Raises:
        CalibrationError: If the comparison was not started by FusionBench's command.
    """
    if not HydraConfig.initialized():
        raise CalibrationError(
            f"method.{SETTING}=true starts the command again for each cell, and this comparison "
            "was not started by fusion_bench: set it to false"
        )


def run_cell(merger: str, cell: str, *, alone: bool) -> None:
    """Repeat this process's command for one cell, which keeps its result in `results_dir`.

    Args:
        merger: The merger.
        cell: The post-merging method; `none` for the merger itself.
        alone: Whether the merger stands alone.

    Raises:
        CalibrationError: If the process fails, with its last words.
    """
    chosen = {
        "references": [],
        "upstreams": [] if alone else [merger],
        "alone": [merger] if alone else [],
        "post_merging": [] if alone else [cell],
    }
    words = [f"method.{key}={_listed(names)}" for key, names in chosen.items()]
    with tempfile.TemporaryDirectory(prefix="featcal-cell-") as folder:
        command = [
            sys.executable, "-m", _PROGRAM, *sys.argv[1:], *words, f"method.{SETTING}=false",
            f"path.log_dir={folder}",
        ]  # fmt: skip
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", check=False,
        )  # fmt: skip
    if done.returncode:
        raise CalibrationError(
            f"its process ended with code {done.returncode}: "
            f"{done.stdout[-_SHOWN:].strip() or 'it said nothing'}"
        )


def _listed(names: list[str]) -> str:
    """A list in Hydra's grammar."""
    return "[" + ",".join(f"'{name}'" for name in names) + "]"
