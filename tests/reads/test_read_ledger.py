"""Only what is needed is read, once, and no source counts otherwise than it reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert
from fusion_bench_featcal.read_budgets import budget_in_bytes


def test_sizes_of_stored_tensors(tmp_path: Path):
    tensors = {
        "double": torch.zeros(3, 5, dtype=torch.float64),
        "half": torch.zeros(3, 5, dtype=torch.float16),
        "brain": torch.zeros(7, dtype=torch.bfloat16),
        "whole": torch.zeros(2, 2, dtype=torch.int64),
        "byte": torch.zeros(9, dtype=torch.uint8),
        "flags": torch.zeros(11, dtype=torch.bool),
        "scalar": torch.zeros((), dtype=torch.float32),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsExpert(tmp_path)
    for name, tensor in tensors.items():
        assert source.nbytes(name) == tensor.numel() * tensor.element_size(), name


def test_experts_that_are_loaded_whole_keep_no_budget():
    with pytest.raises(ValueError, match=r"expert_read_budget needs.*method\.stream_experts=false"):
        FeatCalSettings(expert_read_budget="50%", stream_experts=False)


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (700, 700), (7e2, 700), ("700B", 700), ("2KB", 2000), ("2 KiB", 2048), ("1.5MB", 1500000),
        ("0.1GiB", 107374182), ("3TB", 3 * 10**12), ("50%", 500), ("33.3%", 333), ("100%", 1001),
    ],
)  # fmt: skip
def test_budget_in_bytes(budget: Any, wanted: int):
    kept: Any = FeatCalSettings(expert_read_budget=budget).expert_read_budget
    assert budget_in_bytes(kept, 1001) == wanted
