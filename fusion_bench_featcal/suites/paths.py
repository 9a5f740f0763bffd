"""Where the bundled suites lie on this machine (standard library only, so that anyone may ask)."""

from pathlib import Path

SUITE_ROOT = Path(__file__).resolve().parent / "data"


def suite_path(relative: str) -> str:
    """Return the absolute path of a file or folder of the bundled suites.

    Args:
        relative: path below the suites' data folder with forward slashes, such as
            ``clip-vit-mini/mini_mnist``.

    Returns:
        The absolute path as a string, so that it can stand in a YAML file.

    Raises:
        ValueError: when the path leaves the suites' data folder.
        FileNotFoundError: when the suites have no such file or folder.
    """
    resolved = (SUITE_ROOT / relative).resolve()
    if not resolved.is_relative_to(SUITE_ROOT):
        raise ValueError(f"suite path {relative!r} leaves the suites' folder {SUITE_ROOT}")
    if not resolved.exists():
        known = ", ".join(sorted(entry.name for entry in SUITE_ROOT.glob("*/*")))
        raise FileNotFoundError(
            f"the bundled suites have no {relative!r} below {SUITE_ROOT}; there are: {known}. "
            "`featcal suite check` lists missing and damaged files."
        )
    return str(resolved)
