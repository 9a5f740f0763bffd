"""Origin of a calibrated model: which experts' weights each module was made from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError, sha256_file
from fusion_bench_featcal.json_files import read_json

from .long_table import FEATCAL, file_suffix
from .tables import Grid

PROVENANCE = "provenance.json"
OWN, MERGED = "own", "merged"
_EARLIER = "the run's merged model, made by {merger} for an earlier row"
_MERGED = "merged by {merger}, which read the models by itself"


@dataclass(frozen=True)
class Provenance:
    """Origin of a calibrated model.

    Attributes:
        place: The file that tells it.
        row: Name of the model's row in reports.
        reads: The manifest of what was read (docs/read_budget.md).
        files: File of a saved model -> SHA-256; empty for a run's folder.
    """

    place: Path
    row: str
    reads: Mapping[str, Any]
    files: Mapping[str, str]

    @classmethod
    def find(cls, folder: Path, preset: str | None = None) -> "Provenance":
        """Read the origin of a saved model, or of a row of a run.

        Args:
            folder: The saved model's folder, or a run's log directory.
            preset: The preset whose row is meant, in a log directory; None: the row `featcal`.

        Raises:
            ReportError: If there is neither file, or it is damaged or of an earlier version.
        """
        place = folder / PROVENANCE
        row = FEATCAL if preset is None else f"{FEATCAL}:{preset}"
        if place.is_file() and preset is not None:
            raise ReportError(
                f"{folder} holds one saved model, whose row {place.name} tells: leave out --preset"
            )
        if not place.is_file():
            place = folder / f"reads{file_suffix(row)}.json"
        if not place.is_file():
            there = sorted(path.name for path in folder.glob("reads*.json"))
            raise ReportError(
                f"{folder} has no {PROVENANCE} and no {place.name}: give the folder of a saved "
                "model or the log directory of a method=featcal run"
                + (f", and --preset for one of {', '.join(there)}" if there else "")
            )
        content = read_json(place, sealed=True)
        reads = content.get("reads") if place.name == PROVENANCE else content
        if not isinstance(reads, Mapping) or not isinstance(reads.get("modules"), Mapping):
            raise ReportError(
                f"{place} does not tell which modules were calibrated: no calibration made this "
                "model, or an earlier version wrote the file"
            )
        return cls(place, content.get("row", row), reads, content.get("files", {}))

    def experts_of(self) -> dict[str, dict[str, dict[str, str]]]:
        """Block -> calibrated module -> expert -> `OWN`, or `MERGED` where it was not read."""
        omitted = (self.reads["plan"] or {}).get("omitted", {})
        experts = list(self.reads["experts"])
        return {
            block: {
                name: {e: MERGED if name in omitted.get(e, ()) else OWN for e in experts}
                for name in names
            }
            for block, names in self.reads["modules"].items()
        }

    def grid(self) -> Grid:
        """Table of modules by experts; a block whose modules all agree takes one line."""
        experts, lines = list(self.reads["experts"]), []
        for block, modules in self.experts_of().items():
            cells = [tuple(by.values()) for by in modules.values()]
            if len(set(cells)) == 1:
                lines.append((f"{block} ({_counted(len(cells), 'module')})", cells[0]))
            else:
                lines += list(zip(modules, cells, strict=True))
        return Grid("module", experts, lines)

    def sentences(self) -> Iterator[str]:
        """Sentences on the merger, on what was read of its models, and on their digests."""
        reads, totals = self.reads, self.reads["totals"]
        upstream = reads.get("upstream") or {}
        how = _EARLIER if upstream.get("earlier") else _MERGED
        how = how.format(merger=upstream["merger"]) if upstream else ""
        if upstream and upstream["merger"] is None:
            how = "calibrated on the pool's own merged model"
        yield f"{self.row}: {how}" if how else self.row
        plan = reads["plan"] or {}
        full = f", of {_megabytes(plan['full'])} in all" if plan else ""
        limit = "" if reads["budget"] is None else f"; budget {reads['budget']}, in forward order"
        yield (
            f"calibration read {_megabytes(totals['experts_read'])} of experts{full}{limit}; "
            f"{_megabytes(totals['base_read'])} of the base"
        )
        if merging := totals.get("upstream_experts_read"):
            yield f"the merger read {_megabytes(merging)} of experts besides"
        hashes = reads.get("hashes")
        if hashes is None:
            yield "what was read was not hashed: that happens where the model is saved"
        else:
            for name, found in hashes["models"].items():
                tensors = _counted(len(found["tensors"]), "tensor")
                yield f"{name}: {tensors} read, {found['all'][:16]}"
            yield f"merged model: {hashes['merged'][:16]}"

    def changed_files(self) -> list[str]:
        """Files of the saved model that are missing or not as they were written."""
        folder = self.place.parent
        return [
            name
            for name, digest in self.files.items()
            if not (folder / name).is_file() or sha256_file(folder / name) != digest
        ]


def explain(found: Provenance) -> Sequence[str]:
    """Print where a model comes from.

    Args:
        found: Its origin.

    Returns:
        The files of the saved model that have changed since.
    """
    from .tables import console, titled, without_codes

    screen = console()
    for sentence in found.sentences():
        print(without_codes(sentence))
    title = f"whose weights: {OWN}, or {MERGED} where the expert's were not read"
    for table in titled(title, found.grid().fitting(screen.width)):
        screen.print(table)
    changed = found.changed_files()
    if found.files:
        state = f"changed since: {', '.join(changed)}" if changed else "as they were written"
        print(without_codes(f"files of the model: {state}"))
    return changed


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.4g} MB"
