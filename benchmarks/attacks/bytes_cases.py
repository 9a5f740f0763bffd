"""A few random damages to every kind of file; benchmarks/attack_bytes.py does thousands."""

from pathlib import Path

from attack_bytes import attack

from attacks.files import KINDS, Kind
from attacks.judging import RIGHT, case, expect

_DAMAGES = 12

for _kind in KINDS:

    @case(f"bytes: {_kind.name}", must=RIGHT)
    def _(folder: Path, kind: Kind = _kind) -> None:
        outcomes = attack(kind, _DAMAGES)
        bad = {outcome: times for outcome, times in outcomes.items() if outcome.isupper()}
        expect(not bad, f"of {_DAMAGES} damages {bad}")
