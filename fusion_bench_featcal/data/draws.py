"""Random order of a task's samples."""

import hashlib

import torch


def sample_order(available: int, task: str, seed: int) -> list[int]:
    """Return the positions below `available` in random order, seeded by the seed and the task."""
    digest = hashlib.sha256(f"{seed}:{task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(available, generator=generator).tolist()
