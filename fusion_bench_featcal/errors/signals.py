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
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {n: signal.SIG_DFL for n in _ENDING if signal.getsignal(n) == signal.SIG_DFL}
    for number in before:
        signal.signal(number, _interrupt)
    return before


def end_at_once() -> None:
    """Let the system end this process at a signal.

    A process that waits for others in a collective call of torch would not notice an Interruption.
    """
    for number in _ENDING:
        if signal.getsignal(number) is _interrupt:
            signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: object) -> None:
    raise Interruption(number)


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
    return 128 + int(error.args[0] if isinstance(error, Interruption) else signal.SIGINT)
