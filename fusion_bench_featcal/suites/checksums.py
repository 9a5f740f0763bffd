"""SHA-256 checksums of the bundled files: `featcal suite check` compares them."""

from pathlib import Path

from fusion_bench_featcal.files import sha256_file
from fusion_bench_featcal.suites import paths

CHECKSUM_FILE = "SHA256SUMS"


def write_checksums(root: Path) -> None:
    """Write the checksum of every other file below `root`, in the format of `sha256sum`."""
    target = root / CHECKSUM_FILE
    files = sorted(p for p in root.rglob("*") if p.is_file() and p != target)
    lines = [f"{sha256_file(file)}  {file.relative_to(root).as_posix()}\n" for file in files]
    target.write_text("".join(lines), encoding="utf-8")


def check(root: Path = paths.SUITE_ROOT) -> list[str]:
    """Compare the files below `root` with its checksum file.

    Returns:
        A line for each listed file that is damaged or missing.
    """
    listing = root / CHECKSUM_FILE
    if not listing.is_file():
        return [f"{CHECKSUM_FILE}: missing in {root}"]
    problems = []
    for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (root / name).is_file():
            problems.append(f"{name}: missing")
        elif sha256_file(root / name) != digest:
            problems.append(f"{name}: damaged (its SHA-256 differs from the one recorded)")
    return problems
