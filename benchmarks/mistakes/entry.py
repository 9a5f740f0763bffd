"""One entry of the tables."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A mistake that somebody could make.

    Attributes:
        name: The mistake in a few words.
        file: The file in which it is made, relative to the package.
        old: Text that occurs exactly once in the file.
        new: Text in its place.
        tests: Tests that run first, relative to `tests/`, with spaces between: files or tests.
        reason: Reason why it may survive, or an empty text if it must not.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    reason: str = ""
