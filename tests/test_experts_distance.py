"""Experts far farther from the base than the others are named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.experts import ExpertModel, InMemoryExpert
from fusion_bench_featcal.experts.far_experts import far_experts


def model(distance: float, seed: int) -> nn.Module:
    """A base of ones, and `distance` times a random direction of its own."""
    made = nn.Sequential(nn.Embedding(500, 8), *(nn.Linear(8, 8) for _ in range(20)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + distance * noise)
    return made


@pytest.mark.parametrize("streamed", [True, False])
def test_an_expert_far_from_the_base_is_named_with_its_ratio(
    tmp_path: Path, streamed: bool
) -> None:
    base = model(0, 0)
    experts = {}
    for seed, (name, distance) in enumerate({"a": 0.1, "b": 0.12, "far": 0.8, "c": 0.1}.items()):
        expert = model(distance, seed)
        save_file(expert.state_dict(), tmp_path / f"{name}.safetensors")
        path = tmp_path / f"{name}.safetensors"
        source = SafetensorsExpert(path) if streamed else InMemoryExpert(expert)
        experts[name] = ExpertModel(name, source, base)
    (note,) = far_experts(experts, base)
    assert note.startswith("expert far lies ")
    assert 7 < float(note.split()[3]) < 9


def test_no_expert_is_far_among_equals_or_alone_or_beside_copies_of_the_base() -> None:
    base = model(0, 0)

    def named(*distances: float) -> list[str]:
        made = [InMemoryExpert(model(d, seed)) for seed, d in enumerate(distances)]
        experts = {str(n): ExpertModel(str(n), source, base) for n, source in enumerate(made)}
        return far_experts(experts, base)

    assert named(0.1, 0.2, 0.15) == []
    assert named(5.0) == []
    assert [note.partition(" on a")[0] for note in named(0.0, 0.0, 1.0)] == [
        "expert 0 equals the base",
        "expert 1 equals the base",
    ]


def test_experts_with_a_sibling_as_base_are_named() -> None:
    experts = {
        str(n): ExpertModel(str(n), InMemoryExpert(model(0.1, n)), model(0, 0)) for n in (1, 2)
    }
    assert far_experts(experts, model(0, 0)) == []
    (note,) = far_experts(experts, model(0.1, 3))
    assert note.startswith("the changes from the base to experts 1 and 2 have a cosine of ")
    assert 0.4 < float(note.split("a cosine of ")[1].split()[0]) < 0.6


def test_equal_experts_are_named() -> None:
    base = model(0, 0)
    experts = {n: ExpertModel(n, InMemoryExpert(model(0.1, 1)), base) for n in ("one", "two")}
    assert far_experts(experts, base) == [
        "experts one and two are the same on a sample of weights: check their paths"
    ]
