"""Random damage to one file, chosen by a seed."""

import random
from pathlib import Path


def damage(path: Path, seed: int) -> str:
    """Damage a file; a sentence that says how and where."""
    generator = random.Random(seed)
    data = path.read_bytes()
    size = len(data)
    place = generator.randrange(size) if size else 0
    end = min(size, place + generator.randrange(1, 17))
    what = generator.choice(_DAMAGES)
    if what == "bit":
        flipped = data[place] ^ (1 << generator.randrange(8)) if size else 0
        changed = data[:place] + bytes([flipped]) + data[place + 1 :]
    elif what == "cut":
        changed = data[:place]
    elif what == "insert":
        changed = data[:place] + generator.randbytes(end - place) + data[place:]
    elif what == "remove":
        changed = data[:place] + data[end:]
    elif what == "zeros":
        changed = data[:place] + bytes(end - place) + data[end:]
    else:
        other = generator.randrange(size) if size else 0
        low, high = sorted((place, other))
        width = min(end - place, high - low, size - high)
        changed = data[:low] + data[high : high + width] + data[low + width : high]
        changed += data[low : low + width] + data[high + width :]
    path.write_bytes(changed)
    return f"{what} at {place} of {size}"


_DAMAGES = ("bit", "bit", "bit", "bit", "cut", "insert", "remove", "zeros", "swap")
