"""Report of one run: its rows, in memory and as `report.json`, `.csv` and `.md`."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory
from fusion_bench_featcal.json_files import plain, read_json

from .items import ITEMS_FILE, load_items, save_items
from .long_table import LINES_FILE, write_lines
from .notes import Note
from .report_files import REPORT_FILE, write_files
from .run_rows import RunRows
from .schema import KIND, check_run
from .summary import FailedCell, Summary, summarise_reports
from .views import run_markdown, show_run


class Report(RunRows):
    """Results of one run as files and tables."""

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `report.json`."""
        stored = {item.name: getattr(self, item.name) for item in fields(self)}
        del stored["items"], stored["more"]
        return {
            "kind": KIND,
            "schema": stored.pop("schema"),
            "tasks": self.tasks,
            **plain(stored, "report"),
            "recovered_gap": self.recovered_gap,
            "recovered_gap_per_task": {
                name: {task: self.share(name, task) for task in self.tasks} for name in self.rows
            },
        }

    def write(self, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
        """Write `lines.csv`, `report.md`, `items.npz` (if known) and, last, `report.json`.

        Each file is complete or absent. Return the path of `report.json`.
        """
        content = self.to_dict()
        directory = prepare_directory(directory, setting)
        if self.items:
            save_items(directory, self.items, setting)
        else:
            # An earlier report's items must not be read as items of this one.
            (directory / ITEMS_FILE).unlink(missing_ok=True)
        write_lines(directory / LINES_FILE, self.lines(), setting)
        return write_files(directory, content, run_markdown(self), setting)

    @classmethod
    def load(cls, directory: str | Path) -> "Report":
        """Read the report of `write` in `directory`, with its items if there are any.

        Raises:
            ReportError: If a file is missing, damaged or of another schema.
        """
        path = Path(directory) / REPORT_FILE
        content = read_json(path)
        check_run(content, str(path))
        names = [key.name for key in fields(cls) if key.name in content]
        report = cls(**{name: content[name] for name in names})
        report.notes = [Note(**note) for note in content["notes"]]
        for name, flags in (load_items(Path(directory)) or {}).items():
            if name not in report.rows:
                raise ReportError(f"{path}: items.npz has row '{name}', the report has not")
            row = {task: report.rows[name][task] for task in report.tasks}
            try:
                report._add_items(name, row, flags)
            except ReportError as error:
                raise ReportError(f"{path.with_name(ITEMS_FILE)}: {error}") from error
        return report

    def show(self, *, losses: bool = False) -> None:
        """Print the tables to stdout, followed by the settings, samples and machine of the rows.

        Args:
            losses: Whether to print a table of losses as well.
        """
        show_run(self, losses=losses)


def summarise(directories: Iterable[str | Path], failed: Sequence[FailedCell] = ()) -> Summary:
    """Load runs and average matching ones.

    Args:
        directories: Folders of runs, as `lab.report.find` finds them.
        failed: Cells of comparisons without a result.

    Raises:
        ReportError: If a report is damaged or of another schema, or as `summarise_reports`.
    """
    return summarise_reports({Path(run): Report.load(run) for run in directories}, failed)
