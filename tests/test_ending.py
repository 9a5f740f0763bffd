"""SIGTERM and Ctrl-C end a run cleanly."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from process_group import in_forks

from fusion_bench_featcal.run.ending import ending_cleanly

PROGRAM: Any = SimpleNamespace()


def kill_oneself(signum: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(60)


def ended(work: Any, program: Any = PROGRAM) -> int | str | None:
    """Exit code of work inside the context, in a separate process."""

    def run(_: int) -> None:
        # A command in the background of a shell ignores Ctrl-C, and so would its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with ending_cleanly(program, lambda: "go on"):
            work()

    (result,) = in_forks(1, run)
    assert isinstance(result, SystemExit)
    return result.code


def test_signals_become_exit_codes() -> None:
    assert ended(kill_oneself) == ended(kill_oneself, None) == 143
    assert ended(lambda: kill_oneself(signal.SIGINT)) == 130
    with pytest.raises(KeyboardInterrupt), ending_cleanly(None, lambda: ""):
        raise KeyboardInterrupt


COMMAND = (
    sys.executable, "-m", "fusion_bench.scripts.cli", "method=featcal",
    "modelpool=clip-vit-mini_TA6", "modelpool.default_taskpool=null", "print_config=false",
    "method.presets={}", "method.samples_per_task=64", "method.batch_size=1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stopped_command_leaves_no_temporary_files_and_names_the_way_on(
    signum: int, tmp_path: Path
) -> None:
    is_stored = signum == signal.SIGTERM
    words = [f"path.log_dir={tmp_path}/log"]
    words += [f"method.checkpoint_dir={tmp_path}/blocks"] if is_stored else []
    output, first = tmp_path / "output", tmp_path / "blocks/block-0000.safetensors"
    with open(output, "w") as file:
        run = subprocess.Popen([*COMMAND, *words], cwd=tmp_path, stdout=file, stderr=file)
        while run.poll() is None and not first.exists():
            if not is_stored and "calibrating featcal " in output.read_text():
                break
            time.sleep(0.05)
        run.send_signal(signum)
        assert run.wait() == (143 if is_stored else 130), output.read_text()[-4000:]
    last = output.read_text().strip().splitlines()[-1]
    assert ("method.resume=true" if is_stored else "Set method.checkpoint_dir") in last
    assert not [*tmp_path.rglob("*.part")]
