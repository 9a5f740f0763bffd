"""A study from its runs to its files: points averaged over seeds, tables, figures and page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import LOG_DIR_SETTING, ReportError, prepare_directory, write_atomic
from fusion_bench_featcal.json_files import json_text, plain

from .items import half_width
from .long_table import CORRECT
from .report import Report, csv_text
from .schema import SCHEMA, STUDY_FILE, STUDY_KIND
from .study import Group, Study, difference
from .study_page import show_study, study_markdown
from .summary import COMPARISON_SEED

TABLE_FILE, PAGE_FILE = "table.csv", "study.md"
_UNDRAWN = "not all figures were drawn"
_KEPT = (
    "upstream", "name", "accuracy", "gain", "recovered_gap", "worst_task", "worst_recovered_gap",
    "samples", "spread",
)  # fmt: skip


def make_study(
    name: str,
    suite: str,
    groups: Sequence[Group],
    *,
    seeds: list[int],
    over: list[str],
    against: Mapping[str, Sequence[str]] | None,
    design: str,
) -> Study:
    """Average every point over its seeds.

    Args:
        name: The study's name.
        suite: The model pool.
        groups: The points' runs.
        seeds: All seeds.
        over: Labels that are averaged over.
        against: Row -> rows whose difference from it is of interest; others: from their merger.
        design: As in `Study`.

    Raises:
        ReportError: If no point gave any result.
    """
    for group in groups:
        group.load()
    if not any(group.runs for group in groups):
        reasons = list(dict.fromkeys(cell.reason for g in groups for cell in g.failed))
        raise ReportError(f"no point of the study gave a result: {'; '.join(reasons[:3])}")
    study = Study(
        name=name,
        suite=suite,
        points=[_point(group, against or {}) for group in groups],
        seeds=seeds,
        over=over,
        design=design,
        lines=[line for group in groups for line in _lines(name, suite, group)],
    )
    if len(seeds) == 1:
        study.notes.append(
            f"one seed ({seeds[0]}): intervals are over test items alone; for others set "
            "method.seeds=[42,43,44]"
        )
    notes = (note for g in groups if g.summary for note in g.summary.notes)
    # Of tasks below the merged model every point's report tells.
    study.notes += [note for note in dict.fromkeys(notes) if "below the merged" not in note]
    return study


def write_study(study: Study, directory: str | Path, setting: str = LOG_DIR_SETTING) -> Path:
    """Write figures, table, page and, last, `study.json`; return the last one's path.

    Raises:
        ReportError: If the folder cannot be written.
    """
    directory = prepare_directory(directory, setting)
    _draw(study, directory, setting)
    if study.lines:
        text = csv_text(study.lines[0], study.lines)
        write_atomic(directory / TABLE_FILE, text, setting)
    write_atomic(directory / PAGE_FILE, study_markdown(study), setting)
    content = {"kind": STUDY_KIND, "schema": SCHEMA, **plain(asdict(study), "study")}
    del content["lines"]
    return write_atomic(directory / STUDY_FILE, json_text(content), setting)


def _draw(study: Study, directory: Path, setting: str) -> None:
    """Draw the figures; a note tells of what prevents it."""
    from .study_figures import draw_study  # matplotlib is slow to import

    study.notes = [note for note in study.notes if not note.startswith(_UNDRAWN)]
    try:
        draw_study(study, directory, setting)
    except Exception as error:  # hours of cells reach the tables whatever a drawing raises
        reason = error if isinstance(error, ReportError) else repr(error)
        study.notes.append(f"{_UNDRAWN}: {reason}")


def report_study(folder: Path, out: Path | None = None) -> None:
    """Print a study's tables from its `study.json`, after writing all but the long table to `out`.

    Raises:
        ReportError: If the study is damaged, or `out` cannot be written.
    """
    study = Study.load(folder)
    if out is not None:
        write_study(study, out, "--out")
    show_study(study)


def _point(group: Group, against: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    rows = []
    compared = {row: name for name, names in against.items() for row in names}
    for row in group.summary.rows if group.summary else ():
        own = (group, row.upstream, row.name)
        values = group.by_seed[row.upstream, row.name]
        other = compared.get(row.name, row.upstream)
        gain = None if row.upstream is None else difference(own, (group, row.upstream, other or ""))
        cost = {key: value for key, value in row.cost.items() if isinstance(value, int | float)}
        rows.append(
            {
                **{key: getattr(row, key) for key in _KEPT},
                "seeds": len(values),
                "half_width": half_width([*values.values()]),
                "against": other,
                "difference": gain and asdict(gain),
                "cost": cost,
            }
        )
    failed = [asdict(cell) for cell in group.failed]
    return {"labels": group.labels, "rows": rows, "failed": failed}


def _lines(study: str, suite: str, group: Group) -> Iterator[dict[str, Any]]:
    """The group's part of the long table."""
    for path in group.runs:
        report = Report.load(path)
        seed = report.seeds.get(COMPARISON_SEED)
        for entry in report.entries():
            if entry.metric == CORRECT or not isinstance(entry.value, int | float):
                continue
            place = {"study": study, "suite": suite, **group.labels}
            yield place | {
                "merger": entry.merger, "row": entry.row, "task": entry.task, "seed": seed,
                "metric": entry.metric, "value": f"{entry.value:.6g}",
            }  # fmt: skip
