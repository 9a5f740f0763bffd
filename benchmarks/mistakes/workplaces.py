"""Temporary copies of the project in which mutations are tried."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent.parent


class Workplaces:
    """Temporary copies of the project, and the threads and processes that run tests in them.

    A context manager that always ends the processes and removes the copies.

    Attributes:
        pool: A thread for each copy.
    """

    def __init__(self, count: int) -> None:
        """Prepare.

        Args:
            count: Number of copies.
        """
        self._count = count
        self.pool = ThreadPoolExecutor(count)
        self._temporary = tempfile.TemporaryDirectory(prefix="mutations-")
        self._free: SimpleQueue[Path] = SimpleQueue()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def __enter__(self) -> "Workplaces":
        try:
            for index in range(self._count):
                copy = Path(self._temporary.name) / f"copy-{index}"
                copy_project(copy)
                (copy.parent / f"temporary-{index}").mkdir()
                self._free.put(copy)
        except BaseException:
            self._temporary.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # nothing may interrupt the cleaning
        self._ended = True
        for process in list(self._running):
            kill(process)
        self.pool.shutdown(cancel_futures=True)
        self._temporary.cleanup()

    @contextmanager
    def copy(self) -> Iterator[Path]:
        """Context manager that reserves one of the copies."""
        copy = self._free.get()
        try:
            yield copy
        finally:
            self._free.put(copy)

    def run(self, copy: Path, arguments: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Run Python in a copy.

        Returns:
            The exit code, or None beyond the time limit, and the output.
        """
        environment = os.environ | {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "PYTHONPATH": str(copy),
            "TMPDIR": str(copy.with_name(copy.name.replace("copy", "temporary"))),
        }
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # tests start further processes, which end with it
        )
        self._running.add(process)
        if self._ended:  # between its start and its registration
            kill(process)
        try:
            output, _ = process.communicate(timeout=limit)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            kill(process)
            self._running.discard(process)

    def tests(self, copy: Path, selection: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Run tests in a copy up to the first failure. Returns as `run`."""
        chosen = ["-x", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
        return self.run(copy, ["-m", "pytest", *chosen, *selection], limit)


def kill(process: "subprocess.Popen[str]") -> None:
    """End a process and its children."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def copy_project(target: Path) -> None:
    """Copy all files of the project that git does not ignore."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():  # else it is deleted but still in git's index
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
