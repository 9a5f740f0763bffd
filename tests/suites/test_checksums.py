"""Checksums name what is damaged or missing, and the shipped files pass."""

import pytest

from fusion_bench_featcal.suites.checksums import check, write_checksums
from fusion_bench_featcal.suites.paths import SUITE_ROOT, suite_path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "weights.bin").write_bytes(bytes(range(200)))
    (tmp_path / "notes.md").write_text("notes")
    write_checksums(tmp_path)
    return tmp_path


def test_damaged_and_missing_files_are_named(folder):
    assert check(folder) == []
    file = folder / "inner" / "weights.bin"
    file.write_bytes(bytes([1]) + file.read_bytes()[1:])
    (folder / "notes.md").unlink()
    first, second = check(folder)
    assert first.startswith("inner/weights.bin: damaged") and second == "notes.md: missing"
    (folder / "SHA256SUMS").unlink()
    [problem] = check(folder)
    assert problem.startswith("SHA256SUMS: missing")


def test_the_list_is_in_the_format_of_sha256sum(folder):
    lines = (folder / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    assert [line[64:] for line in lines] == ["  inner/weights.bin", "  notes.md"]
    assert lines[1][:64] == "ab5aa97074c454a0632057e704220d9a6678fbf773a0a5806fc09b8173b07309"


def test_the_shipped_files_are_whole_and_all_listed():
    assert check() == []
    listing = (SUITE_ROOT / "SHA256SUMS").read_text(encoding="utf-8").splitlines()
    listed = {line.partition("  ")[2] for line in listing} | {"SHA256SUMS"}
    assert listed == {
        file.relative_to(SUITE_ROOT).as_posix() for file in SUITE_ROOT.rglob("*") if file.is_file()
    }


def test_every_shipped_file_but_the_notes_is_data_and_no_pickle():
    suffixes = {file.suffix for file in SUITE_ROOT.rglob("*") if file.is_file()}
    assert suffixes <= {".npz", ".parquet", ".safetensors", ".json", ".txt", ".md", ""}


def test_paths_resolve_inside_the_package_only():
    assert suite_path("clip-vit-mini/mini_mnist") == str(SUITE_ROOT / "clip-vit-mini/mini_mnist")
    with pytest.raises(FileNotFoundError, match=r"no 'clip-vit-mini/mnist'.*featcal suite check"):
        suite_path("clip-vit-mini/mnist")
    with pytest.raises(ValueError, match="leaves the suites' folder"):
        suite_path("../paths.py")
