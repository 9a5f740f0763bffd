"""SHA-256 checksums of the bundled files: `featcal suite check` compares them."""

import hashlib
from pathlib import Path

from fusion_bench_featcal.suites import paths
from fusion_bench_featcal.suites.paths import SUITE_ROOT

CHECKSUM_FILE = "SHA256SUMS"


def write_checksums(root: Path = SUITE_ROOT) -> Path:
    """Write the checksum of every file below `root`, in the format of `sha256sum`.

    Args:
        root: folder to walk; its own checksum file is left out.

    Returns:
        The file written.
    """
    target = root / CHECKSUM_FILE
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != target)
    lines = [f"{_digest(file)}  {file.relative_to(root).as_posix()}" for file in files]
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def check(root: Path = SUITE_ROOT) -> list[str]:
    """Compare the files below `root` with its checksum file.

    Args:
        root: folder that holds `SHA256SUMS`; by default the bundled suites.

    Returns:
        One line a problem, naming the file: damaged or missing. Empty when all is well. Files that
        the list does not name are left alone.
    """
    listing = root / CHECKSUM_FILE
    if not listing.is_file():
        return [f"{CHECKSUM_FILE}: missing in {root}"]
    found = (_problem(root, name, expected) for name, expected in _recorded(listing).items())
    return [problem for problem in found if problem]


def damage(name: str) -> str:
    """Compare one file of the bundled suites with the checksum file, where that names it.

    Args:
        name: its path below the suites' folder.

    Returns:
        A line that names the file and the problem; empty when all is well.
    """
    root = paths.SUITE_ROOT
    listing = root / CHECKSUM_FILE
    expected = _recorded(listing).get(name) if listing.is_file() else None
    return "" if expected is None else _problem(root, name, expected)


def _recorded(listing: Path) -> dict[str, str]:
    lines = listing.read_text(encoding="utf-8", errors="replace").splitlines()
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def _problem(root: Path, name: str, expected: str) -> str:
    if not (root / name).is_file():
        return f"{name}: missing"
    if _digest(root / name) != expected:
        return f"{name}: damaged (its SHA-256 differs from the one recorded)"
    return ""


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
