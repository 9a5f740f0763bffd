"""Experts in files take no memory but for the tensors in hand."""

from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file

from fusion_bench_featcal import SafetensorsExpert


def is_open(file: Path) -> bool:
    """Whether this process maps a file or has it open."""
    process = psutil.Process()
    mapped = {entry.path for entry in process.memory_maps()}
    return str(file) in mapped | {entry.path for entry in process.open_files()}


def test_file_is_open_only_while_a_tensor_of_it_is_read(tmp_path: Path):
    file = tmp_path / "model.safetensors"
    stored = {"a": torch.ones(3, 5), "b": torch.zeros(4)}
    save_file(stored, file)
    source = SafetensorsExpert(tmp_path)
    assert source.names() == {"a", "b"}
    assert source.shape("a") == (3, 5)
    tensor = source.tensor("a")
    assert torch.equal(tensor, stored["a"])
    assert not is_open(file)
