"""Runs found below folders and joined: the one table that every view selects from."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.plurals import counted
from fusion_bench_featcal.files.untrusted import read_json
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN

from .lines import REPORT_FILE, RUN_FILE, SCHEMA, VALUE, read_run
from .notes import RECORD, Note
from .run import DIMENSIONS, Line, Row, Run, label_texts, with_average

log = logging.getLogger(__name__)

UNSET = "unset"
"""Label of a setting that a row lacks and another row of its name has."""


@dataclass(frozen=True)
class Results:
    """Rows of joined runs.

    Attributes:
        rows: Each row of each seed once, with the settings that differ as labels.
        runs: Folder -> its run, the oldest first.
        notes: Notes of all runs with the labels of their rows, each once.
    """

    rows: Sequence[Row]
    runs: Mapping[Path, Run]
    notes: Sequence[Note]

    @property
    def labels(self) -> list[str]:
        """Names of the settings that differ."""
        return list(dict.fromkeys(key for row in self.rows for key in row.labels))

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of whole models."""
        return list(dict.fromkeys(metric for row in self.rows for metric in row.scores))

    def lines(self) -> list[Line]:
        """Return all numbers as lines, with a column for each label."""
        lines = [line for row in self.rows for line in row.lines()]
        lines += [line for run in self.runs.values() for line in run.more_lines()]
        empty = dict.fromkeys([*self.labels, *DIMENSIONS, VALUE], "")
        return [{key: line.get(key, "") for key in empty} for line in lines]

    def frame(self) -> Any:
        """Return `lines` as a pandas DataFrame."""
        from pandas import DataFrame  # slow to import

        return DataFrame(self.lines())


def load(*folders: str | Path) -> Any:
    """Return all measured values in or below folders, one number per line.

    Args:
        *folders: Folders of runs, comparisons, finished cells or diagnoses, or their parents.

    Returns:
        A pandas DataFrame: suite, merger, row, task, block, class, seed, metric, the settings that
        differ between runs, and `value`.

    Raises:
        ReportError: If there are no results, a file is damaged, or runs of a suite have different
            tasks.
    """
    return join_folders(folders).frame()


def join_folders(folders: Iterable[str | Path]) -> Results:
    """Find, read and join runs (see `load`)."""
    runs = {folder: read_run(folder) for folder in find(folders)}
    return join(dict(sorted(runs.items(), key=lambda entry: _changed(entry[0]))))


def find(paths: Iterable[str | Path]) -> list[Path]:
    """Return the folders of runs at or below paths, each once.

    Raises:
        ReportError: If a path does not exist or has no run, or only one of an earlier layout.
    """
    folders: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise ReportError(f"no such run: {path}")
        folder = path if path.is_dir() else path.parent
        below = [file.parent for file in sorted(folder.rglob(RUN_FILE)) if _is_run(file, folder)]
        if not below:
            _refuse_earlier(folder)
            raise ReportError(f"no run in or below {path}: a run's log directory has {RUN_FILE}")
        folders |= {run.resolve(): run for run in below}
    return list(folders.values())


def _is_run(file: Path, start: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(start).parts)
    return file.is_file() and not hidden


def _refuse_earlier(folder: Path) -> None:
    for file in sorted(folder.rglob(REPORT_FILE)):
        content = read_json(file)
        if "schema" in content:
            raise ReportError(
                f"{file} has schema {content['schema']} and no {RUN_FILE}, and this version reads "
                f"{SCHEMA}: run again"
            )


def _changed(folder: Path) -> tuple[int, Path]:
    return (folder / RUN_FILE).stat().st_mtime_ns, folder


# ---- joining


def join(runs: Mapping[Path, Run]) -> Results:
    """Join runs, given the oldest first.

    Of rows with equal settings and seeds the newest counts, with a warning if their accuracies
    differ: they differ in versions, in pools or in code.

    Raises:
        ReportError: If runs of a suite have different tasks or test items.
    """
    rows: dict[str, Row] = {}
    origins: dict[str, Path] = {}
    older: list[str] = []
    for folder, run in runs.items():
        for row in run.rows:
            key = _key(row)
            before = rows.pop(key, None)
            rows[key] = row
            if before and before.tasks and before.accuracy != row.accuracy:
                older.append(f"{before.title} of {origins[key]}")
            origins[key] = folder
    if older:
        log.warning(
            "%s left out: newer rows with the same settings and seeds differ in models, versions, "
            "pools or code: %s. Report such folders one by one",
            counted(len(older), "row"), ", ".join(dict.fromkeys(older)),
        )  # fmt: skip
    joined = _labelled(list(rows.values()))
    _check_tests(joined)
    labels = dict(zip(rows, (row.labels for row in joined), strict=True))
    notes = dict.fromkeys(note for run in runs.values() for note in _notes(run, labels))
    return Results(joined, runs, [*notes, *_versions(runs.values())])


def _key(row: Row) -> str:
    values = [row.suite, row.merger, row.name, row.seed, _settings(row)]
    return json.dumps(values, sort_keys=True, default=str)


def _settings(row: Row) -> dict[str, Any]:
    """Return the settings that make a row another one. A seed has a column of its own."""
    of_row = row.conditions | row.settings
    return {key: of_row[key] for key in of_row if key not in ("seed", *SETTINGS_OF_THE_RUN)}


def _labelled(rows: Sequence[Row]) -> list[Row]:
    """Return rows with the settings in which rows of one name differ as labels.

    A setting that only some of these rows have is a difference.
    """
    by_name: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(_position(row), []).append(_settings(row))
    keys = {name: dict.fromkeys(k for one in of for k in one) for name, of in by_name.items()}
    differing = dict.fromkeys(
        key
        for name, of in by_name.items()
        for key in keys[name]
        if len({json.dumps(one.get(key, UNSET), sort_keys=True, default=str) for one in of}) > 1
    )
    return [
        replace(row, labels={k: _label(of.get(k, UNSET)) for k in differing if k in keys[name]})
        for row in rows
        for name, of in [(_position(row), _settings(row))]
    ]


def _position(row: Row) -> tuple[str, ...]:
    return row.suite, row.merger, row.name


def _label(value: Any) -> Any:
    """Return a setting's value as a number or text."""
    if isinstance(value, Mapping):
        return " ".join(str(_label(part)) for part in value.values())
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    return value if is_plain else json.dumps(value, default=str)


def _check_tests(rows: Iterable[Row]) -> None:
    first: dict[tuple[str, Any], Row] = {}
    for row in (row for row in rows if row.tasks):
        other = first.setdefault((row.suite, row.labels.get("tasks")), row)
        one, two = ({task: len((of.correct or {}).get(task, ())) for task in of.tasks}
                    for of in (other, row))  # fmt: skip
        if one.keys() != two.keys() or any(
            one[task] and two[task] and one[task] != two[task] for task in one
        ):
            raise ReportError(
                f"rows of {row.suite} have different tasks or test items: {other.title} has {one}, "
                f"{row.title} has {two}"
            )


def _notes(run: Run, labels: Mapping[str, Mapping[str, Any]]) -> Iterator[Note]:
    """Yield a run's notes with the labels that their rows share. `labels` are by key of a row."""
    for note in run.notes:
        rows = [row for row in run.rows if note.merger in ("", row.merger)]
        named = [row for row in rows if row.name == note.row]
        subjects = named or [row for row in rows if row.is_repair]
        first, *others = [labels[_key(row)] for row in subjects] or [{}]
        shared = {k: v for k, v in first.items() if all(of.get(k) == v for of in others)}
        yield replace(note, point=", ".join(label_texts(shared)))


def _versions(runs: Iterable[Run]) -> Iterator[Note]:
    """Yield a note on each package of which the runs used several versions."""
    numbers: dict[str, dict[str, None]] = {}
    for run in runs:
        for package, number in run.versions.items():
            numbers.setdefault(package, {})[number] = None
    for package, several in numbers.items():
        if len(several) > 1:
            text = f"runs used different versions of {package}: {', '.join(sorted(several))}"
            yield Note(RECORD, text)


# ---- rows over their seeds


@dataclass(frozen=True)
class Group:
    """Rows that differ in their seed alone."""

    rows: Sequence[Row]

    @property
    def first(self) -> Row:
        """One of the rows, for what they share."""
        return self.rows[0]

    def means(self, metric: str) -> dict[str, float]:
        """Return task (and `average`) -> mean over the seeds, for tasks that all of them have."""
        return with_average(_means([row.scores.get(metric, {}) for row in self.rows]))

    def cost(self) -> dict[str, float]:
        """Return means over the seeds of what all of them measured."""
        return _means([row.cost for row in self.rows])

    def fits(self, other: "Group") -> bool:
        """Return whether labels that both have are equal."""
        one, two = self.first.labels, other.first.labels
        return all(two.get(key, value) == value for key, value in one.items())


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each value that all rows have."""
    shared = (key for key in rows[0] if all(key in row for row in rows))
    return {key: fmean(row[key] for row in rows) for key in shared}


def groups_of(results: Results) -> list[Group]:
    """Return rows over their seeds: base, experts, then each merger before its repairs."""
    groups: dict[str, list[Row]] = {}
    for row in results.rows:
        key = json.dumps([row.suite, row.merger, row.name, row.labels])
        groups.setdefault(key, []).append(row)
    mergers = list(dict.fromkeys((row.suite, row.merger) for row in results.rows))
    suites = list(dict.fromkeys(row.suite for row in results.rows))

    def order(group: Group) -> tuple[Any, ...]:
        row = group.first
        references = (suites.index(row.suite), bool(row.merger), row.name != "base")
        return *references, mergers.index((row.suite, row.merger)), row.is_repair

    return sorted(map(Group, groups.values()), key=order)
