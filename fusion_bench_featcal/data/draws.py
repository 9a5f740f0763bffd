"""Choice of samples: in random order, or evenly spaced."""

import hashlib


def sample_order(available: int, task: str, seed: int) -> list[int]:
    """Return the positions below `available` in random order, seeded by the seed and the task."""
    import torch  # slow to import, and `evenly_spaced` does without

    digest = hashlib.sha256(f"{seed}:{task}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randperm(available, generator=generator).tolist()


def evenly_spaced(count: int, most: int | None) -> list[int]:
    """Return at most `most` of `count` positions, evenly spaced."""
    size = count if most is None else min(count, most)
    return [index * count // size for index in range(size)]
