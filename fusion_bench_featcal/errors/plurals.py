"""Numbers as text: with their nouns, and as sizes in bytes."""


def pluralize(number: int | str, noun: str) -> str:
    """Return a number and its noun, with an s in the plural, such as `1 task`, `2 tasks`.

    Args:
        number: A number, or a text with numbers, such as `8 to 16`.
        noun: The noun in the singular. More words may follow, as in `row of --data`.
    """
    head, gap, tail = noun.partition(" of ")
    return f"{number} {head}{'' if str(number) == '1' else 's'}{gap}{tail}"


def bytes_text(count: float) -> str:
    """Return a number of bytes as text in GiB, MiB or KiB."""
    for unit, step in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= step:
            return f"{count / step:.{2 if count < 10 * step else 1}f} {unit}"
    return f"{count / 1024:.0f} KiB"
