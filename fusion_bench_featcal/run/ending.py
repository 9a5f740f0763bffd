"""SIGTERM and Ctrl-C: a run cleans up, prints how to continue, and exits with the usual code."""

import atexit
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_terminating = threading.Event()
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


class Terminated(SystemExit):
    """SIGTERM as an exception that no `except Exception` catches."""

    def __str__(self) -> str:
        return "ended by SIGTERM"


@contextmanager
def ending_cleanly(program: Any, how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Context that turns SIGTERM into an exception, so that temporary files are removed.

    The handler is installed in the main thread only.

    Args:
        program: The running FusionBench program. Its exit code after Ctrl-C is 130. Without a
            program a KeyboardInterrupt is raised again.
        how_to_go_on: Returns the last line that the process prints.

    Raises:
        SystemExit: With code 143 after SIGTERM, 130 after Ctrl-C.
    """
    handler = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or handler is _terminate:
        yield
        return
    _terminating.clear()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except BaseException as stop:
        interrupted = isinstance(stop, KeyboardInterrupt) and program is not None
        if not (interrupted or _terminating.is_set()):
            raise
        # At exit, because FusionBench logs the exception first.
        atexit.register(_print_error, how_to_go_on())
        if isinstance(stop, Terminated):
            raise
        # A library may have replaced the handler's exception by another one.
        raise SystemExit(INTERRUPTED) if interrupted else Terminated(TERMINATED) from stop
    finally:
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


def ends_cleanly(run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Decorate a method's `run` that saves only at its end with `ending_cleanly`."""

    @wraps(run)
    def ending(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with ending_cleanly(getattr(args[0], "_program", None), lambda: NOTHING_SAVED):
            return run(*args, **kwargs)

    return ending


NOTHING_SAVED = "Interrupted. Nothing was saved. Run the command again to start over."


def _print_error(line: str) -> None:
    """Print to the standard error of that time: one that was captured before may be closed."""
    print(line, file=sys.stderr, flush=True)


def _terminate(*_: Any) -> None:
    _terminating.set()
    raise Terminated(TERMINATED)
