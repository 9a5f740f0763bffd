"""Classes of users, which settings name."""

from pkgutil import resolve_name


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
