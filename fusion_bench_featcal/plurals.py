"""Numbers with their nouns."""


def counted(number: int | str, noun: str) -> str:
    """Write a number before a noun that takes an s in the plural, such as `1 task`, `2 tasks`.

    Args:
        number: A number, or a text with one or several, such as `8 to 16`.
        noun: The noun in the singular; what follows it may be added, as in `row of --data`.
    """
    head, gap, rest = noun.partition(" of ")
    return f"{number} {head}{'' if str(number) == '1' else 's'}{gap}{rest}"
