"""Errors with a message for the user, who needs no traceback."""

from collections.abc import Sequence


class CalibrationError(RuntimeError):
    """Calibration cannot go on. The message names the place, the cause and the setting to change.

    Attributes:
        places: Where it failed, added by `error_context`: the widest place first.
        remedy: Sentence after the message, from the nearest place that has one.
    """

    def __init__(self, message: str = "") -> None:
        """Start without a place."""
        super().__init__(message)
        self.places, self.remedy = list[str](), ""

    def passes(self, places: Sequence[str], remedy: str = "") -> None:
        """Add a remedy, and places around those so far that the message does not have."""
        text = str(self)
        self.places[:0] = [p for p in places if p not in self.places and not text.startswith(p)]
        self.remedy = self.remedy or remedy

    def __str__(self) -> str:
        """Return `place, place: message. Remedy`."""
        text = super().__str__()
        text = f"{text.rstrip('.')}. {self.remedy}" if self.remedy else text
        return f"{', '.join(self.places)}: {text}" if self.places else text


class NotImproved(CalibrationError):
    """With --strict, a task does not improve, so nothing is saved."""


class LostProcessError(CalibrationError):
    """Another process does not answer."""


class ReportError(RuntimeError):
    """A result cannot be written, read or compared. The message names the file and the cause."""
