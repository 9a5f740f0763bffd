"""Errors of words in transcripts."""

import re


def words(text: str) -> list[str]:
    """Return a text's words in small letters, without punctuation and apostrophes."""
    return re.findall(r"\w+", re.sub("['\u2019]", "", text.lower()))


def word_errors(spoken: str, written: str) -> int:
    """Return the smallest number of inserted, deleted and replaced words between two texts."""
    others = words(written)
    above = list(range(len(others) + 1))
    for row, word in enumerate(words(spoken), 1):
        current = [row]
        for column, other in enumerate(others, 1):
            replaced = above[column - 1] + (word != other)
            current.append(min(above[column] + 1, current[-1] + 1, replaced))
        above = current
    return above[-1]
