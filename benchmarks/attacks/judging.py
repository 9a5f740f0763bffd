"""Outcomes of attacks: right, refused with a message that names its place, WRONG or RAW."""

import logging
import math
import os
import re
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import fusion_bench_featcal
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.results import ReportError

RIGHT, REFUSED, WRONG, RAW = "right", "refused", "WRONG", "RAW"
MOST_LINES = 10
WIDTH = 80
_PACKAGE = Path(fusion_bench_featcal.__file__).parent


class WrongResult(Exception):
    """A result that an independent computation contradicts."""


class ShownRefusal(Exception):
    """The message block that a command left on the screen before it ended with code 1."""


class RawTraceback(Exception):
    """The last line of a traceback on the screen."""


@dataclass(frozen=True)
class Case:
    """An attack.

    Attributes:
        name: Section and what is done, such as `images: 16-bit grey`.
        run: Does it in an empty folder. Returns if the result is right, raises `WrongResult` if it
            is not; any other exception is judged as a refusal.
        words: Patterns that a refusal must hold.
        must: `either`, or the only outcome that counts: `right` or `refused`.
        never: Patterns that a refusal must not hold, such as a wrong hint.
        slow: Whether it takes more than a few seconds.
    """

    name: str
    run: Callable[[Path], object]
    words: tuple[str, ...] = ()
    must: str = "either"
    never: tuple[str, ...] = ()
    slow: bool = False


@dataclass(frozen=True)
class Verdict:
    """Outcome of one case; `first_line` is of its message, `lines` its length at 80 columns."""

    case: str
    outcome: str
    lines: int
    first_line: str

    @property
    def passed(self) -> bool:
        """True if the package may be trusted here."""
        return self.outcome in (RIGHT, REFUSED)

    def as_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


CASES: list[Case] = []


def case(name: str, *words: str, **options: Any) -> Callable[[Callable], Callable]:
    """Register a function as a case; see `Case`."""

    def register(run: Callable[[Path], object]) -> Callable[[Path], object]:
        CASES.append(Case(name, run, words, **options))
        return run

    return register


def judge(attack: Case) -> Verdict:
    """Run a case in a folder of its own, and judge what came of it."""
    folder = Path(tempfile.mkdtemp(prefix="featcal-attack-"))
    folder.chmod(0o755)  # some cases read as another user
    before = os.getcwd()
    os.chdir(folder)
    try:
        attack.run(folder)
    except WrongResult as error:
        return _verdict(attack, WRONG, str(error))
    except Exception as error:
        return _judged_refusal(attack, error)
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    if attack.must == REFUSED:
        return _verdict(attack, WRONG, "accepted, must be refused")
    return _verdict(attack, RIGHT, "")


def _judged_refusal(attack: Case, error: Exception) -> Verdict:
    message = str(error)
    if not is_own(error):
        shown = message if isinstance(error, RawTraceback) else f"{type(error).__name__}: {message}"
        return _verdict(attack, RAW, shown)
    if attack.must == RIGHT:
        return _verdict(attack, WRONG, f"refused, must be right: {message}")
    missing = [word for word in attack.words if not _holds(message, word)]
    hints = [word for word in attack.never if _holds(message, word)]
    if missing:
        return _verdict(attack, WRONG, f"message lacks {missing}: {message}")
    if hints:
        return _verdict(attack, WRONG, f"message must not say {hints}: {message}")
    if lines_of(message) > MOST_LINES:
        return _verdict(attack, WRONG, f"message of {lines_of(message)} lines: {message}")
    return _verdict(attack, REFUSED, message)


def is_own(error: BaseException) -> bool:
    """Tell whether the package raised an error: its own classes, or a documented one."""
    if isinstance(error, CalibrationError | ReportError | ShownRefusal):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    raised_in_package = bool(frames) and Path(frames[-1].filename).is_relative_to(_PACKAGE)
    return type(error) in (ValueError, FileNotFoundError) and raised_in_package


def _holds(message: str, pattern: str) -> bool:
    # A screen may break a message anywhere.
    return re.search(pattern, " ".join(message.split()), re.IGNORECASE) is not None


def lines_of(message: str) -> int:
    """Lines of a message on a screen of 80 columns."""
    return sum(max(1, math.ceil(len(line) / WIDTH)) for line in message.splitlines())


def _verdict(attack: Case, outcome: str, message: str) -> Verdict:
    first = message.strip().splitlines()[0] if message.strip() else ""
    return Verdict(attack.name, outcome, lines_of(message), first)


def expect(condition: object, message: str) -> None:
    """Raise `WrongResult` unless a condition holds."""
    if not condition:
        raise WrongResult(message)


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Messages that the package logs meanwhile, from INFO on, each `LEVEL text`."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(f"{record.levelname} {record.getMessage()}")

    logger, listener = logging.getLogger("fusion_bench_featcal"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def expect_warning(messages: list[str], *words: str) -> None:
    """Raise `WrongResult` unless one warning holds all words."""
    warnings = [text for text in messages if text.startswith(("WARNING", "ERROR"))]
    if not any(all(_holds(text, word) for word in words) for text in warnings):
        raise WrongResult(f"no warning with {list(words)} among {len(warnings)}: {warnings[:2]}")
