"""Content of a page: what runs left, divided into sections."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.results.columns import accuracy_cells
from fusion_bench_featcal.results.find import ResultFolders
from fusion_bench_featcal.results.long_table import AVERAGE, FEATCAL, merged_by
from fusion_bench_featcal.results.summary import Summary, SummaryRow
from fusion_bench_featcal.results.tables import ABSENT, WORST
from fusion_bench_featcal.results.views import failures, sentences

from . import tables
from .figures import accuracy_figure, cost_figure, drift_figures, samples_figure
from .groups import Group, addresses, files_in, folders_of, groups_of
from .parts import Card, Cards, Figure, Lines, Links, Page, Part, Section, Table, warnings_and_notes

_CARDS = 3  # of a merger, where there are few mergers
_MOST_CARDS = 12
_TABLES_ONLY = [
    "made from written tables: the runs themselves, with their settings, samples, drift and "
    "intervals by task, are not there"
]


def page_of(folders: ResultFolders, place: Path, defaults: Mapping[str, Any]) -> Page:
    """Collect everything about runs and comparisons.

    Args:
        folders: Their folders.
        place: Folder of the page, which links are relative to.
        defaults: FeatCal's settings by name, which others are marked against.

    Raises:
        ReportError: If a report is damaged, runs that are averaged contradict one another, or there
            are studies and something else.
    """
    folders.refuse_studies_with(folders.studies)
    page = _page_of_runs(folders, place, defaults)
    return replace(page, sections=[_without_empty_parts(section) for section in page.sections])


def _page_of_runs(folders: ResultFolders, place: Path, defaults: Mapping[str, Any]) -> Page:
    groups = groups_of(folders)
    if not groups:
        raise ReportError(f"no row to show in {', '.join(map(str, folders.tables))}")
    warnings = _warnings(groups, folders)
    sections = [
        Section("What was gained", [Cards(_cards(groups))]),
        Section("Notes and warnings", warnings_and_notes(warnings)),
        Section("Accuracy", [tables.accuracy(group) for group in groups]),
        Section("Figures", _figures(groups)),
        Section("Costs", [tables.costs(group) for group in groups]),
        Section("Settings", [tables.settings(group, defaults) for group in groups]),
        Section("Data", [tables.data(group) for group in groups]),
        Section("Loss", [tables.losses(group) for group in groups], folded=True),
        Section("All measurements", [tables.measured(g) for g in groups], folded=True),
        Section("Meaning of the columns", [Lines(_meanings(groups))], folded=True),
        Section("Versions and device", [tables.environments(groups)], folded=True),
        Section("Files", [Links(_files(folders, place))], folded=len(folders.runs) > 3),
    ]
    title = ", ".join(dict.fromkeys(one.suite for one in groups))
    mergers = dict.fromkeys(row.upstream for group in groups for row in group.rows if row.upstream)
    subtitle = merged_by(", ".join(mergers))
    if runs := len(folders.runs):
        subtitle += f"; {runs} run{'s' * (runs != 1)}"
    return Page(title, subtitle, sections)


def _warnings(groups: Sequence[Group], folders: ResultFolders) -> list[str]:
    """Sentences on failed cells, and the runs' notes."""
    cells = [*folders.failed, *(cell for group in groups for cell in group.summary.failed)]
    lines = [*failures(dict.fromkeys(cells)), *([] if folders.runs or not groups else _TABLES_ONLY)]
    lines += [note for group in groups for note in group.summary.notes]
    return list(dict.fromkeys(lines))


def _without_empty_parts(section: Section) -> Section:
    """The section without tables, figures and cards that have nothing to show."""
    parts = [part for part in section.parts if _has_content(part)]
    return replace(section, parts=parts)


def _has_content(part: Part) -> bool:
    match part:
        case Table():
            return bool(part.rows and part.columns)
        case Figure():
            return bool(part.panels)
        case Cards():
            return bool(part.cards)
        case Lines():
            return bool(part.lines)
        case _:
            return True


def _cards(groups: Sequence[Group]) -> list[Card]:
    """FeatCal's rows of each merger; those of other methods where it has none."""
    members = []
    for group in groups:
        for merger in dict.fromkeys(row.upstream for row in group.rows if row.is_repair):
            rows = [row for row in group.rows if row.is_repair and row.upstream == merger]
            featcal = [row for row in rows if row.name.startswith(FEATCAL)]
            members.append([_card(row, group) for row in (featcal or rows)[:_CARDS]])
    most = _CARDS if sum(map(len, members)) <= _MOST_CARDS else 1
    return [card for cards in members for card in cards[:most]]


def _card(row: SummaryRow, group: Group) -> Card:
    cells = accuracy_cells(row)
    gain, _, limits = cells["gain over merger"].partition(" ")
    unit = "points over the merged model" if gain != ABSENT else "no merged model to compare with"
    merged = [one for one in group.rows if one.name == one.upstream == row.upstream]
    before = f"{accuracy_cells(merged[0])[AVERAGE]} to " if merged else ""
    limits = limits.replace(" ", "\N{NO-BREAK SPACE}")
    lines = [f"{unit} {limits}".strip(), f"average accuracy: {before}{cells[AVERAGE]} %"]
    if cells["recovered gap"] != ABSENT:
        lines.append(f"{cells['recovered gap']} of the gap to the experts recovered")
    task, share = (cells[column] for column in WORST)
    if row.worst is not None:
        least = "smallest gain" if share == ABSENT else f"{share} of its gap"
        lines.append(f"worst task: {task}, {least}")
    lines = [line.replace(" %", "\N{NO-BREAK SPACE}%") for line in lines]
    return Card(row.name, f"{group.title}, {merged_by(row.upstream)}", gain, lines)


def _figures(groups: Sequence[Group]) -> list[Figure]:
    suites: dict[str, list[Group]] = {}
    for group in groups:
        suites.setdefault(group.suite, []).append(group)
    titled = [(suite, samples_figure(members)) for suite, members in suites.items()]
    for group in groups:
        titled += [(group.title, draw(group)) for draw in (accuracy_figure, cost_figure)]
    figures = [replace(figure, title=f"{title}: {figure.title}") for title, figure in titled]
    return [*figures, *drift_figures(folders_of(groups))]


def _meanings(groups: Sequence[Group]) -> list[str]:
    """Meaning of the columns; what the runs note and what failed stands elsewhere."""
    summaries: dict[int, Summary] = {id(group.summary): group.summary for group in groups}
    lines: dict[str, None] = {}
    for summary in summaries.values():
        for suite in summary.suites:
            rows = [row for row in summary.rows if row.suite == suite]
            bare = replace(summary, rows=rows, notes=[], failed=[])
            lines |= dict.fromkeys(sentences(bare))
    return list(lines)


def _files(folders: ResultFolders, place: Path) -> dict[str, dict[str, str]]:
    """Folder -> file -> its address from the page."""
    runs = folders.runs or folders.tables
    return {
        str(folder): addresses(files_in(folder), place)
        for folder in dict.fromkeys([*folders.comparisons, *runs])
    }
