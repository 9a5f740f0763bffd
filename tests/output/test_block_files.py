"""Files of finished blocks are whole or absent."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_bench_featcal.files import ReportError, write_atomic, write_whole
from fusion_bench_featcal.tensor_files import read_tensors, write_tensors

TENSORS = {"a": torch.ones(3)}
WRITERS = {
    "bytes": lambda path: write_whole(path, b"new"),
    "result": lambda path: write_atomic(path, "new"),
    "tensors": lambda path: write_tensors(path, TENSORS),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(143)])
def test_file_that_cannot_be_finished_leaves_the_old_one(
    writer: str, error: BaseException, tmp_path: Path, monkeypatch
):
    path = tmp_path / "blocks.json"
    path.write_bytes(b"old")

    def stop(*_: Any) -> None:
        raise error

    monkeypatch.setattr("os.fsync", stop)
    with pytest.raises((OSError, ReportError, SystemExit)):
        WRITERS[writer](path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_as_they_were(dtype: torch.dtype, tmp_path: Path):
    tensors = {"a": torch.randn(3, 4).to(dtype), "t": torch.randn(3, 4).to(dtype).T}
    tensors["tied"] = tensors["a"]
    found = read_tensors(tmp_path / "x", write_tensors(tmp_path / "x", tensors))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())
    assert read_tensors(tmp_path / "y", write_tensors(tmp_path / "y", {})) == {}
