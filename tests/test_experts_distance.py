"""Experts that lie unusually with respect to the base are named; files are closed after reads."""

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.far_experts import far_experts


def model(distance: float, seed: int) -> nn.Module:
    """A base of ones, moved by `distance` in a random direction."""
    net = nn.Sequential(nn.Embedding(500, 8), *(nn.Linear(8, 8) for _ in range(20)))
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():
        parameter.data.copy_(1 + distance * torch.randn(parameter.shape, generator=generator))
    return net


def notes_of(folder: Path, *experts: tuple[float, int]) -> list[str]:
    """Notes on experts of distances and seeds, of which those of odd seeds are in files."""
    named, base = {}, model(0, 0)
    for number, (distance, seed) in enumerate(experts):
        expert = model(distance, seed)
        save_file(expert.state_dict(), folder / f"{number}.safetensors")
        file = SafetensorsExpert(folder / f"{number}.safetensors")
        source = file if seed % 2 else InMemoryExpert(expert)
        named[str(number)] = ExpertModel(str(number), source, base)
    return far_experts(named, base)


@pytest.mark.parametrize("seed", [2, 5])
def test_an_expert_far_from_the_base_is_named_with_its_ratio(tmp_path: Path, seed: int) -> None:
    (note,) = notes_of(tmp_path, (0.1, 0), (0.12, 1), (0.8, seed), (0.1, 3))
    assert note.startswith("expert 2 lies ") and 7 < float(note.split()[3]) < 9


def test_experts_at_like_distances_are_not_named(tmp_path: Path) -> None:
    assert notes_of(tmp_path, (0.1, 0), (0.2, 1), (0.15, 2)) == []
    assert notes_of(tmp_path, (5.0, 0)) == []
    assert notes_of(tmp_path, (0.1, 1), (0.1, 2)) == []


def test_copies_of_the_base_and_equal_experts_are_named(tmp_path: Path) -> None:
    equal = notes_of(tmp_path, (0.0, 0), (0.0, 1), (1.0, 2))
    assert [note.partition(" on a")[0] for note in equal] == [
        "expert 0 equals the base", "expert 1 equals the base"
    ]  # fmt: skip
    assert notes_of(tmp_path, (0.1, 1), (0.1, 1)) == [
        "experts 0 and 1 are the same on a sample of weights: check their paths"
    ]


def test_file_is_open_only_while_a_tensor_of_it_is_read(tmp_path: Path) -> None:
    file, process = tmp_path / "model.safetensors", psutil.Process()
    save_file({"a": torch.ones(3, 5), "b": torch.zeros(4)}, file)
    source = SafetensorsExpert(tmp_path)
    assert source.names() == {"a", "b"} and source.shape("a") == (3, 5)
    assert torch.equal(source.tensor("a"), torch.ones(3, 5))
    assert str(file) not in {entry.path for entry in process.memory_maps()}
    assert str(file) not in {entry.path for entry in process.open_files()}
