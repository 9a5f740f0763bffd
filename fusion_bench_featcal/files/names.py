"""Names of tasks, rows and mergers that can be names of files."""

import re
from collections.abc import Iterable

_KEYS_OF_RESULTS = frozenset({"average", "model_info"})
"""Keys beside the tasks in results of FusionBench and in reports."""
_MOST_BYTES = 100
_USABLE = re.compile(r"\w([\w .,:;+=@&%()#~'-]{0,98}[\w+)=-])?")


def refuse_unusable_names(
    names: Iterable[object], setting: str, reserved: Iterable[str] = ()
) -> None:
    """Refuse names that cannot be file names on Linux and macOS, or have another meaning.

    Args:
        names: Names of tasks, mergers or presets.
        setting: The option or setting with the names, for the message.
        reserved: Names with another meaning.

    Raises:
        ValueError: If a name has other signs, is too long or reserved, or differs from another only
            in case.
    """
    taken = {*_KEYS_OF_RESULTS, *reserved}
    for name in map(str, names):
        is_usable = _USABLE.fullmatch(name) and len(name.encode()) <= _MOST_BYTES
        if not is_usable or name.casefold() in taken:
            raise ValueError(
                f"{setting}: {name[:100]!r} cannot be a file name, or is already used. Choose a "
                f"name of at most {_MOST_BYTES} bytes of letters, digits and signs such as _ and -"
            )
        taken.add(name.casefold())
