"""Report of one run: its rows, in memory and as `report.json`, `.csv` and `.md`."""

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.json_files import json_text, plain, read_json

from .items import ITEMS_FILE, load_items, save_items
from .long_table import ACCURACY, COMPARISON_SEED, LOSS, SHARE
from .run_page import print_run, run_markdown
from .run_rows import RunRows
from .schema import KIND, check_run

REPORT_FILE = "report.json"


def write_files(
    directory: Path, content: Mapping[str, Any], table: str, page: str, setting: str
) -> Path:
    """Write `report.csv`, `report.md` and, last, `report.json`; return the last one's path."""
    text = json_text(content)
    write_atomic(directory / "report.csv", table, setting)
    write_atomic(directory / "report.md", page, setting)
    return write_atomic(directory / REPORT_FILE, text, setting)


def csv_text(columns: Iterable[str], lines: Iterable[Mapping[str, Any]]) -> str:
    """Return a head and lines as CSV; what a line lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


class Report(RunRows):
    """Results of one run as files and tables."""

    def to_dict(self) -> dict[str, Any]:
        """Return what `report.json` holds."""
        stored = {item.name: getattr(self, item.name) for item in fields(self)}
        del stored["items"]
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
        """Write `report.csv`, `report.md`, `items.npz` (if known) and, last, `report.json`.

        Each file is whole or absent, whatever happens. Returns the path of `report.json`.
        """
        content = self.to_dict()
        directory = prepare_directory(directory, setting)
        if self.items:
            save_items(directory, self.items, setting)
        else:
            # An earlier report's items would be taken for this one's.
            (directory / ITEMS_FILE).unlink(missing_ok=True)
        return write_files(directory, content, self.csv(), run_markdown(self), setting)

    @classmethod
    def load(cls, directory: str | Path) -> "Report":
        """Read the report that `write` left in `directory`, with its items when there are any.

        Raises:
            ReportError: Something is missing, damaged or of another schema; the message says what.
        """
        path = Path(directory) / REPORT_FILE
        content = read_json(path)
        check_run(content, str(path))
        names = [key.name for key in fields(cls) if key.name != "items" and key.name in content]
        report = cls(**{name: content[name] for name in names})
        for name, flags in (load_items(Path(directory)) or {}).items():
            if name not in report.rows:
                raise ReportError(f"{path}: items.npz has row '{name}', the report has not")
            row = {task: report.rows[name][task] for task in report.tasks}
            try:
                report._add_items(name, row, flags)
            except ReportError as error:
                raise ReportError(f"{path.with_name(ITEMS_FILE)}: {error}") from error
        return report

    def csv(self) -> str:
        """Return the long form: one line per row and task (the average counts as a task)."""
        metrics = (ACCURACY, SHARE, LOSS)
        lines: dict[tuple[str, str], dict[str, str | None]] = {}
        for entry in self.entries():
            if entry.metric in metrics:
                place = {"suite": entry.suite, "upstream": entry.merger}
                place |= {"name": entry.row, "task": entry.task}
                line = lines.setdefault((entry.row, entry.task), place)
                line[entry.metric] = f"{entry.value:.6f}"
        return csv_text(("suite", "upstream", "name", "task", *metrics), lines.values())

    def lines(self) -> list[dict[str, Any]]:
        """Return the long table of numbers: labels, then suite to value."""
        seed = self.seeds.get(COMPARISON_SEED, self.seeds_key)
        return [
            {
                **self.labels, "suite": entry.suite, "merger": entry.merger, "row": entry.row,
                "task": entry.task, "seed": seed, "metric": entry.metric,
                "value": f"{entry.value:.6g}",
            }
            for entry in self.entries()
            if isinstance(entry.value, int | float)
        ]  # fmt: skip

    def show(self, *, losses: bool = False) -> None:
        """Print the tables to stdout, and under them what was calibrated with what, and where.

        Args:
            losses: Whether to print a table of losses besides.
        """
        print_run(self, losses=losses)
