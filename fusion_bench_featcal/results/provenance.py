"""Origin of a calibrated model: the experts that each module's weights came from."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError, sha256_file
from fusion_bench_featcal.json_files import read_json
from fusion_bench_featcal.plurals import bytes_text, counted

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
        place: The file with the origin.
        row: Name of the model's row in reports.
        reads: The count of reads (docs/read_budget.md).
        files: File of a saved model -> SHA-256, empty for a run's folder.
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
            preset: In a log directory the preset of the row, or None for the row `featcal`.

        Raises:
            ReportError: If there is neither file, or it is damaged.
        """
        file = folder / PROVENANCE
        row = FEATCAL if preset is None else f"{FEATCAL}_{preset}"
        if file.is_file() and preset is not None:
            raise ReportError(f"{folder} is a saved model, which has one row: leave out --preset")
        if not file.is_file():
            file = folder / f"reads{file_suffix(row)}.json"
        if not file.is_file():
            available = sorted(path.name for path in folder.glob("reads*.json"))
            raise ReportError(
                f"{folder} has no {PROVENANCE} and no {file.name}: give the folder of a saved "
                "model or the log directory of a method=featcal run"
                + (f", and --preset for one of {', '.join(available)}" if available else "")
            )
        content = read_json(file)
        reads = content.get("reads") if file.name == PROVENANCE else content
        if not isinstance(reads, Mapping) or not isinstance(reads.get("modules"), Mapping):
            raise ReportError(
                f"{file} does not list calibrated modules: no calibration made this model, or an "
                "earlier version wrote the file"
            )
        return cls(file, content.get("row", row), reads, content.get("files", {}))

    def experts_of(self) -> dict[str, dict[str, dict[str, str]]]:
        """Return block -> calibrated module -> expert -> `OWN`, or `MERGED` if it was not read."""
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
        """Return a table of modules by experts, with one line for a block of equal modules."""
        experts, lines = list(self.reads["experts"]), []
        for block, modules in self.experts_of().items():
            cells = [tuple(by.values()) for by in modules.values()]
            if len(set(cells)) == 1:
                lines.append((f"{block} ({counted(len(cells), 'module')})", cells[0]))
            else:
                lines += list(zip(modules, cells, strict=True))
        return Grid("module", experts, lines)

    def sentences(self) -> Iterator[str]:
        """Yield sentences on the merger, its reads and their digests."""
        reads, totals = self.reads, self.reads["totals"]
        upstream = reads.get("upstream") or {}
        how = _EARLIER if upstream.get("earlier") else _MERGED
        how = how.format(merger=upstream["merger"]) if upstream else ""
        if upstream and upstream["merger"] is None:
            how = "calibrated on the pool's own merged model"
        yield f"{self.row}: {how}" if how else self.row
        plan = reads["plan"] or {}
        full = f", of {bytes_text(plan['full'])} in all" if plan else ""
        limit = "" if reads["budget"] is None else f"; budget {reads['budget']}, in forward order"
        yield (
            f"calibration read {bytes_text(totals['experts_read'])} of experts{full}{limit}; "
            f"{bytes_text(totals['base_read'])} of the base"
        )
        if merging := totals.get("upstream_experts_read"):
            yield f"the merger also read {bytes_text(merging)} of experts"
        hashes = reads.get("hashes")
        if hashes is None:
            yield "no digests: only a model that is saved has digests of its tensors"
        else:
            for name, digests in hashes["models"].items():
                tensors = counted(len(digests["tensors"]), "tensor")
                yield f"{name}: {tensors} read, {digests['all'][:16]}"
            yield f"merged model: {hashes['merged'][:16]}"

    def changed_files(self) -> list[str]:
        """List the files of the saved model that are missing or have changed."""
        folder = self.place.parent
        return [
            name
            for name, digest in self.files.items()
            if not (folder / name).is_file() or sha256_file(folder / name) != digest
        ]


def explain(origin: Provenance) -> Sequence[str]:
    """Print a model's origin. Return the files of the saved model that have changed since."""
    from .tables import console, titled, without_codes

    screen = console()
    for sentence in origin.sentences():
        print(without_codes(sentence))
    title = f"whose weights: {OWN}, or {MERGED} where the expert's were not read"
    for table in titled(title, origin.grid().fitting(screen.width)):
        screen.print(table)
    changed = origin.changed_files()
    if origin.files:
        state = f"changed since: {', '.join(changed)}" if changed else "as they were written"
        print(without_codes(f"files of the model: {state}"))
    return changed
