"""Content of a page on studies: what `featcal report` prints of them, their curves and files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError
from fusion_bench_featcal.results.drawing import marks
from fusion_bench_featcal.results.find import ResultFolders, find
from fusion_bench_featcal.results.long_table import BASE, EXPERTS, FEATCAL
from fusion_bench_featcal.results.study import Study, label_text
from fusion_bench_featcal.results.study_curves import AXIS_NAMES, Curve, centre, curves
from fusion_bench_featcal.results.study_figures import figure_names, planes, source_of
from fusion_bench_featcal.results.study_page import (
    COSTS,
    bars,
    failures,
    meanings,
    rows_of,
    study_grids,
)
from fusion_bench_featcal.results.tables import ABSENT

from . import tables
from .groups import addresses, files_in, groups_of, told_apart
from .parts import (
    Card,
    Cards,
    Figure,
    Image,
    Lines,
    Links,
    Page,
    Part,
    Section,
    Table,
    warnings_and_notes,
)
from .svg import Axis, Panel, Point, Series

_CARDS = 3  # of a merger
_POINTS = "points"
_Curves = Mapping[str, Curve]


def page_of_studies(folders: Sequence[Path], place: Path, defaults: Mapping[str, Any]) -> Page:
    """Collect everything about studies.

    Args:
        folders: Their folders.
        place: Folder of the page, which links are relative to.
        defaults: FeatCal's settings by name, which others are marked against.

    Raises:
        ReportError: If a study, or the report of a point that is shown, is damaged.
    """
    studies = told_apart({folder: Study.load(folder) for folder in folders}, _title)
    each = list(studies.values())
    figures = [part for folder, study in studies.items() for part in _figures(study, folder)]
    versions = tables.versions({_title(one): (one.versions, one.device) for one in each})
    sections = [
        Section("What was gained", [Cards([card for one in each for card in _cards(one)])]),
        Section(
            "Notes and warnings",
            warnings_and_notes(_lines(each, lambda one: [*failures(one), *one.notes]).lines),
        ),
        Section("Figures", figures),
        Section("Tables", [table for one in each for table in _tables(one)]),
        Section("Settings", [t for f, one in studies.items() for t in _settings(one, f, defaults)]),
        Section("Meaning of the numbers", [_lines(each, meanings)]),
        Section("Versions and device", [versions], folded=True),
        Section("Files", [Links(_files(folders, place))], folded=True),
    ]
    title = ", ".join(map(_title, each))
    return Page(title, f"{'study' if len(each) == 1 else 'studies'} of FeatCal", sections)


def _title(study: Study) -> str:
    return f"{study.suite}, {study.name}"


def _cards(study: Study) -> Iterator[Card]:
    """Least and largest difference from the merged model over the points, FeatCal's rows first."""
    for merger in filter(None, study.mergers):
        gains: dict[str, list[tuple[Mapping[str, float], str]]] = {}
        for row, labels in rows_of(study, merger):
            if row["difference"] and row.get("against") == merger and row["name"] not in (
                merger, BASE, EXPERTS,
            ):  # fmt: skip
                gains.setdefault(row["name"], []).append((row["difference"], label_text(labels)))
        featcal = [name for name in gains if name.startswith(FEATCAL)]
        for name in (featcal or list(gains))[:_CARDS]:
            yield _card(name, f"{_title(study)}, over {merger}", gains[name])


def _card(name: str, subtitle: str, gains: Sequence[tuple[Mapping[str, float], str]]) -> Card:
    ordered = sorted(gains, key=lambda gain: gain[0]["estimate"])
    ends = [f"{100 * gain['estimate']:+z.1f}" for gain, _ in (ordered[0], ordered[-1])]
    if len(gains) == 1:
        return Card(
            name, subtitle, ends[0], [f"points over the merged model {_limits(gains[0][0])}"]
        )
    lines = [f"points over the merged model, at {len(gains)} points of the study"]
    for word, end, (gain, point) in zip(
        ("least", "most"), ends, (ordered[0], ordered[-1]), strict=True
    ):
        lines.append(f"{word}: {end} {_limits(gain)} at {point}")
    return Card(name, subtitle, " to ".join(ends), lines)


def _limits(gain: Mapping[str, float]) -> str:
    return f"[{100 * gain['low']:+z.1f},\N{NO-BREAK SPACE}{100 * gain['high']:+z.1f}]"


def _lines(studies: Sequence[Study], tell: Callable[[Study], Sequence[str]]) -> Lines:
    """Sentences on all studies, with a study's name where there are several."""
    several = len(studies) > 1
    lines = [f"{_title(s)}: {line}" if several else line for s in studies for line in tell(s)]
    return Lines(lines)


def _tables(study: Study) -> list[Table]:
    return [
        tables.of_grid(grid, f"{_title(study)}: {title}", grid.corner or "point")
        for title, grid in study_grids(study)
    ]


def _figures(study: Study, folder: Path) -> Iterator[Part]:
    """Curves along axes; figures of another kind as `featcal plot` has drawn them."""
    missing, stale = [], []
    for merger, name in figure_names(study).items():
        figure = (
            _cost_figure(study, merger) if study.name == "cost" else _curve_figure(study, merger)
        )
        if figure.panels:
            yield figure
        drawn = [] if figure.panels else [name]
        drawn += [f"{name}-{one}-{other}" for one, other in planes(study)]
        for file in (folder / f"{each}.svg" for each in drawn):
            drawing = _read(file) if file.is_file() else None
            if drawing is None:
                missing.append(file.name)
            elif source_of(study).encode() not in drawing:
                stale.append(file.name)
            else:
                text = f"{_title(study)}, over {merger}: {file.stem}"
                yield Image(text, drawing, f"{text}. Its values are in the tables.")
    again = f"`featcal plot {folder}` draws them beside study.json; write this page again after it"
    if missing:
        yield Lines([f"{', '.join(missing)}: {again}"])
    if stale:
        yield Lines([f"left out, drawn from other results: {', '.join(stale)}. {again}"])


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ReportError(f"cannot read {file}: {error.strerror or error}") from error


def _curve_figure(study: Study, merger: str) -> Figure:
    """A panel for each axis."""
    lines = curves(study, merger)
    label = "average accuracy, %"
    panels = [_panel(f"along {axis}", axis, rows, label, merger) for axis, rows in lines.items()]
    note = bars(study)
    if study.design == "each":
        note += f". Along each axis the other settings are {label_text(centre(study))}"
    return Figure(
        f"{_title(study)}: accuracy over {merger}", panels, note[0].upper() + note[1:] + "."
    )


def _cost_figure(study: Study, merger: str) -> Figure:
    """A panel for each cost along the first axis."""
    panels = []
    for key, (label, unit, _) in COSTS.items():
        for axis, rows in list(curves(study, merger, key).items())[:1]:
            scaled = {
                name: Curve(x, [value / unit for value in y], [value / unit for value in half])
                for name, (x, y, half) in rows.items()
            }
            panels.append(_panel(label, axis, scaled, label, merger))
    note = "Bars: 95 % interval over seeds." if len(study.seeds) > 1 else ""
    return Figure(f"{_title(study)}: costs over {merger}", panels, note)


def _panel(title: str, axis: str, rows: _Curves, label: str, merger: str) -> Panel:
    rows = {name: curve for name, curve in rows.items() if name != BASE}
    looks = marks(list(rows), merger)
    series = []
    for name, curve in rows.items():
        points = [_point(name, axis, *values) for values in zip(*curve, strict=True)]
        shown = "merged model" if name == merger else name
        series.append(Series(shown, looks[name], points, joined=True))
    points = [point for one in series for point in one.points]
    ends = [end for point in points for end in (point.y, *(point.bar or ()))]
    return Panel(
        title,
        Axis.settings([point.x for point in points], AXIS_NAMES.get(axis, axis)),
        Axis.linear(ends, label),
        series,
        f"{label} along {axis}, {title}. {'; '.join(point.tip for point in points)}.",
    )


def _point(name: str, axis: str, x: float, y: float, half: float) -> Point:
    more = f" ± {half:.1f}" if half else ""
    bar = (y - half, y + half) if half else None
    return Point(x, y, f"{name}, {axis} = {x:g}: {y:.1f}{more}", bar)


def _settings(study: Study, folder: Path, defaults: Mapping[str, Any]) -> Iterator[Table]:
    """Labels of the points with their values, and the settings of the first one's rows."""
    values = {
        label: list(dict.fromkeys(str(p["labels"].get(label, ABSENT)) for p in study.points))
        for label in study.labels
    }
    facts = {
        **{f"{label} (of the points)": ", ".join(texts) for label, texts in values.items()},
        "seeds": ", ".join(map(str, study.seeds)),
        "averaged over": ", ".join([*study.over, "seeds"]),
        "design": study.design,
        "minutes of the last pass": ABSENT if study.minutes is None else f"{study.minutes:.1f}",
    }
    lines = [(name, [tables.words(text)]) for name, text in facts.items()]
    yield Table(f"{_title(study)}: points", "setting", ["values"], lines)
    places = sorted(
        place for place in folder.glob(f"{_POINTS}/*") if any(place.glob("*/report.json"))
    )
    if places:
        runs: ResultFolders = find(places[:1])
        for group in groups_of(runs):
            table = tables.settings(group, defaults)
            caption = f"{_title(study)}: settings at the point {places[0].name}"
            yield Table(caption, table.corner, table.columns, table.rows, table.only)


def _files(folders: Sequence[Path], place: Path) -> dict[str, dict[str, str]]:
    """Files of each study, and the reports of its points."""
    files = {}
    for folder in folders:
        files[str(folder)] = addresses(files_in(folder), place)
        points = folder / _POINTS
        files[str(points)] = addresses(sorted(points.rglob("report.md")), place, points)
    return {name: found for name, found in files.items() if found}
