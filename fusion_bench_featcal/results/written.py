"""Written tables of several runs, read again where the runs are no longer there."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fusion_bench_featcal.json_files import read_json

from .find import FailedCell
from .items import Interval
from .report import REPORT_FILE
from .schema import check_table
from .summary import Summary, SummaryRow

_INTERVALS = ("gain_interval", "recovered_gap_interval")
# A report of another kind than a comparison lacks these.
_ABSENT: dict[str, Any] = {"normalised": None, "spread": {}, "samples": ""}


def load_table(directory: str | Path) -> Summary:
    """Read what `views.write_combined` or `write_side_by_side` left in `directory`.

    What only runs tell, such as flags per test item, is not in it.

    Raises:
        ReportError: Something is missing, damaged or of another schema; the message says what.
    """
    path = Path(directory) / REPORT_FILE
    content = read_json(path)
    check_table(content, str(path))
    keys = FailedCell.__dataclass_fields__
    return Summary(
        rows=[_row(row) for row in content["rows"]],
        runs=[],
        notes=content["notes"],
        failed=[FailedCell(**{k: cell.get(k) for k in keys}) for cell in content.get("failed", ())],
    )


def _row(stored: Mapping[str, Any]) -> SummaryRow:
    values: dict[str, Any] = {**_ABSENT, **stored}
    for name in _INTERVALS:
        if values.get(name) is not None:
            values[name] = Interval(**values[name])
    # A comparison has the row's seeds and a number of runs, the other kind every run's seeds.
    seeds = values.get("seeds", [])
    if "runs" in values:
        values["run_seeds"] = [{} for _ in range(values["runs"])]
    else:
        values |= {"run_seeds": seeds, "seeds": []}
    named: dict[str, Any] = {field.name: values.get(field.name) for field in fields(SummaryRow)}
    return SummaryRow(**named)
