"""Signals that end a program, such as those of a cluster's scheduler, as Ctrl-C does."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Interruption(KeyboardInterrupt):
    """A signal asked the program to end. Its argument is the number of the signal."""


def raise_interruptions() -> dict[signal.Signals, Any]:
    """Raise an Interruption at SIGTERM and SIGHUP. Returns the handlers so far.

    A signal that is ignored, as under nohup, stays so. Only the main thread has handlers.
    """

    def interrupt(number: int, frame: Any) -> None:
        raise Interruption(number)

    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler == signal.SIG_DFL}
    for number in before:
        signal.signal(number, interrupt)
    return before


@contextmanager
def interruptions() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP raise an Interruption."""
    before = raise_interruptions()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code of an interrupted program: 128 and the number of the signal."""
    number = error.args[0] if isinstance(error, Interruption) else signal.SIGINT
    return 128 + int(number)
