"""SHA-256 checksums of the bundled files: `featcal suite check` compares them."""

import hashlib
from pathlib import Path

from fusion_bench_featcal.suites import paths

CHECKSUM_FILE = "SHA256SUMS"


def write_checksums(root: Path) -> None:
    """Write the checksum of every other file below `root`, in the format of `sha256sum`."""
    target = root / CHECKSUM_FILE
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != target)
    lines = [f"{_digest(file)}  {file.relative_to(root).as_posix()}\n" for file in files]
    target.write_text("".join(lines), encoding="utf-8")


def check(root: Path = paths.SUITE_ROOT) -> list[str]:
    """Compare the files below `root` with its checksum file.

    Returns:
        A line for each file that is damaged or missing. Files that the list does not name are left
        alone.
    """
    recorded = _recorded(root)
    if recorded is None:
        return [f"{CHECKSUM_FILE}: missing in {root}"]
    return [line for name, digest in recorded.items() if (line := _problem(root, name, digest))]


def data_file(name: str) -> str:
    """Path of a data file, given below the suites' folder, once its checksum is compared.

    Raises:
        ValueError: If the file is damaged or missing.
    """
    root = paths.SUITE_ROOT
    expected = (_recorded(root) or {}).get(name)
    if expected is not None and (problem := _problem(root, name, expected)):
        raise ValueError(f"{problem}. Install fusion_bench_featcal again")
    return paths.suite_path(name)


def _recorded(root: Path) -> dict[str, str] | None:
    """Name -> digest of the files below a folder; None where it has no list."""
    listing = root / CHECKSUM_FILE
    if not listing.is_file():
        return None
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
