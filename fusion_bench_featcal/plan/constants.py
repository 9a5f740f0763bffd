"""What the cost model cannot count: fitted by `python benchmarks/plan.py --fit`, in one file."""

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("constants.json")


@dataclass(frozen=True)
class Constants:
    """Fitted numbers; a factor says how many times what was counted and measured it really takes.

    Attributes:
        passes: Factor of the products in block passes.
        elements: Factor of what else they do, entry by entry.
        moments: Factor of sums over rows.
        folds: Factor of adding a task's sums to the block's.
        solves: Factor of factorisations and solves.
        call_seconds: Seconds of one operation of a model beside its arithmetic.
        visit_seconds: Seconds of one task's visit to a block beside all that is counted.
        byte_seconds: Seconds to read and check one byte of an expert that the system has cached.
        memory_bytes: Bytes that any calibration takes.
        carried: Factor of the samples' features in memory.
        visited: Factor of what one block's visit holds.
    """

    passes: float = 1.0
    elements: float = 1.0
    moments: float = 1.0
    folds: float = 1.0
    solves: float = 1.0
    call_seconds: float = 5e-6
    visit_seconds: float = 1e-3
    byte_seconds: float = 5e-10
    memory_bytes: float = 2e7
    carried: float = 1.0
    visited: float = 1.0

    def write(self, path: Path = FILE) -> None:
        """Write them where `constants` reads them."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


@cache
def constants() -> Constants:
    """The fitted constants that come with the package."""
    values = json.loads(FILE.read_text(encoding="utf-8"))
    return Constants(**{field.name: float(values[field.name]) for field in fields(Constants)})
