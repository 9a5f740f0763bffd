"""Classes of users and of other packages, which settings name."""

from importlib.metadata import entry_points
from pkgutil import resolve_name

FAMILIES, RULES = "fusion_bench_featcal.families", "fusion_bench_featcal.rules"
"""Entry point groups of other packages."""


def installed_classes(group: str) -> dict[str, str]:
    """Return the classes that installed packages offer as entry points, name -> dotted name.

    No package is imported.
    """
    return {point.name: point.value.replace(":", ".") for point in entry_points(group=group)}


def named_class(target: object, setting: str, example: str) -> type:
    """Return the class that a setting names by `_target_`.

    Args:
        target: The dotted name.
        setting: The setting, for the message.
        example: Name of a class, for the message.

    Raises:
        ValueError: If it cannot be imported.
    """
    try:
        return resolve_name(str(target))
    except Exception as error:  # importing a module may raise anything
        raise ValueError(
            f"{setting}: _target_ {target!r} cannot be imported ({error}). Give "
            f"my_module.{example}, with my_module.py in the folder of the run or installed"
        ) from error
