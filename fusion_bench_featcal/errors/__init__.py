"""Errors with a message for the user, who needs no traceback."""


class CalibrationError(RuntimeError):
    """Calibration cannot go on. The message names the cause and the setting to change."""


class NotImproved(CalibrationError):
    """With --strict, a task does not improve, so nothing is saved."""


class LostProcessError(CalibrationError):
    """Another process does not answer."""


class ReportError(RuntimeError):
    """A result cannot be written, read or compared. The message names the file and the cause."""
