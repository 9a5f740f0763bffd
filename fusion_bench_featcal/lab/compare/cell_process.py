"""A cell of a comparison in a process of its own, so that its costs are its own."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from fusion_bench_featcal.settings import CalibrationError

SETTING = "process_per_cell"
_PROGRAM = "fusion_bench.scripts.cli"
_SHOWN = 2000  # characters of a process's last words
_PATIENCE = 20  # seconds that a process has to end when it is asked to


def check_command() -> None:
    """Refuse processes of cells where there is no single command to repeat.

    Raises:
        CalibrationError: If the comparison was not started by FusionBench's command, or is one of
            several that a sweep started.
    """
    known = HydraConfig.initialized()
    if not known or HydraConfig.get().mode == RunMode.MULTIRUN:
        raise CalibrationError(
            f"method.{SETTING}=true starts the command again for each cell, and this comparison "
            f"was {'one of a sweep' if known else 'not started by fusion_bench'}: set it to false"
        )


def run_cell(
    merger: str, cell: str, *, alone: bool, results_dir: Path, words: Sequence[str] = ()
) -> str:
    """Repeat this process's command for one cell, which keeps its result.

    Args:
        merger: The merger.
        cell: The post-merging method; `none` for the merger itself.
        alone: Whether the merger stands alone.
        results_dir: Where results are kept.
        words: Further words of the command, such as those of a study's point.

    Returns:
        Its last words.
    """
    with tempfile.TemporaryDirectory(prefix="featcal-cell-") as folder:
        chosen = {
            "method.references": "[]",
            "method.upstreams": _listed([] if alone else [merger]),
            "method.alone": _listed([merger] if alone else []),
            "method.post_merging": _listed([] if alone else [cell]),
            f"method.{SETTING}": "false",
            "method.results_dir": quoted(str(results_dir.resolve())),
            "path.log_dir": quoted(folder),
        }
        words = [*words, *(f"{key}={value}" for key, value in chosen.items())]
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, *sys.argv[1:], *words], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        try:
            said, _ = process.communicate()
        except BaseException:  # interrupted: it cleans up behind itself, if it is let
            process.terminate()
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    return f"its process ended with code {process.returncode}: {said[-_SHOWN:].strip()}"


def _listed(names: list[str]) -> str:
    """A list in Hydra's grammar."""
    return f"[{','.join(map(quoted, names))}]"


def quoted(text: str) -> str:
    """A text in Hydra's grammar."""
    return "'" + text.replace("'", "\\'") + "'"
