"""Joining runs: all their models, with the settings in which models of one name differ."""

import json
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from fusion_bench_featcal.errors import ReportError
from fusion_bench_featcal.errors.plurals import pluralize
from fusion_bench_featcal.settings import SETTINGS_OF_THE_RUN
from fusion_bench_featcal.settings.rules import STRENGTHS

from .columns import DIMENSIONS, VALUE, setting_column
from .cost import PACKAGES
from .names import INPUTS, TEST_CONDITIONS, label_texts
from .notes import NOTE, Note
from .rows import Line, Row
from .run import Run

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

log = logging.getLogger(__name__)

UNSET = "unset"
"""Label of a setting that a model lacks and another model of its name has."""
SAMPLES = "samples used"
"""Label of samples per task and split, if models of equal settings used different samples."""


@dataclass(frozen=True)
class Results:
    """Joined runs.

    Attributes:
        rows: Each model with each seed once, with the settings that differ as labels.
        runs: Folder -> its run, the oldest first.
        notes: Notes of all runs with the labels of their models, each once.
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
        empty = dict.fromkeys([*map(setting_column, self.labels), *DIMENSIONS, VALUE], "")
        return [{key: line.get(key, "") for key in empty} for line in lines]

    def frame(self) -> Any:
        """Return `lines` as a pandas DataFrame."""
        from pandas import DataFrame  # slow to import

        return DataFrame(self.lines())


def join(runs: Mapping[Path, Run]) -> Results:
    """Join runs, given the oldest first.

    Of models with equal settings and seeds the newest counts. If the accuracies of such models
    differ, their versions or code differ, and a warning names them.

    Raises:
        ReportError: If runs of a suite have different tasks or test items.
    """
    rows: dict[str, Row] = {}
    origins: dict[str, Path] = {}
    outdated: list[str] = []
    keys: dict[Path, list[str]] = {}
    # Hub models and data of which the runs used several commits.
    commits = [name for name in _mixed_versions(runs.values()) if name not in ("python", *PACKAGES)]
    for folder, run in runs.items():
        run_versions = {f"commit of {name}": run.versions.get(name) for name in commits}
        for row in (replace(row, point=_point(row, run_versions)) for row in run.rows):
            key = as_key([row.suite, row.merger, row.name, row.seed, row.point])
            keys.setdefault(folder, []).append(key)
            before = rows.pop(key, None)
            rows[key] = row
            if before and before.tasks and before.accuracy != row.accuracy:
                outdated.append(f"{before.title} of {origins[key]}")
            origins[key] = folder
    if outdated:
        log.warning(
            "left out %s (%s), because newer ones with the same settings and seeds differ in "
            "versions or code. Report such folders one by one",
            pluralize(len(outdated), "result"), ", ".join(dict.fromkeys(outdated)),
        )  # fmt: skip
    joined = list(rows.values())
    _set_labels(joined)
    _check_tests(joined)
    notes = dict.fromkeys(
        note
        for folder, run in runs.items()
        for note in _labelled_notes(run, [rows[key].labels for key in keys.get(folder, ())])
    )
    return Results(_drop_copies(joined), runs, [*notes, *_version_notes(runs.values())])


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return values by a key, in order of appearance."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def _mixed_versions(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Return package, hub model or data set -> its versions, if the runs used several."""
    numbers: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, number in run.versions.items():
            numbers.setdefault(name, {})[number] = None
    return {name: sorted(several) for name, several in numbers.items() if len(several) > 1}


def _point(row: Row, run_versions: dict[str, Any]) -> dict[str, object]:
    """Return the values that distinguish models: settings, conditions, samples, commits."""
    conditions = {f"run.{k}" if k in row.settings else k: v for k, v in row.conditions.items()}
    # Models of FeatCal+ have all settings, also those of the paper's rule, which have no effect.
    unused = {*SETTINGS_OF_THE_RUN, *(STRENGTHS if row.settings.get("rule") == "plus" else ())}
    settings = {k: v for k, v in row.settings.items() if k not in unused}
    used = sorted([task, *entry.values()] for task, entry in row.samples.items())
    return dict(_flatten(conditions | settings | run_versions | ({SAMPLES: used} if used else {})))


def _flatten(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the entries of nested mappings by dotted names, with 1.0 as 1."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, float) and value.is_integer():
            yield f"{prefix}{key}", int(value)
        else:
            yield f"{prefix}{key}", value


def as_key(value: object) -> str:
    """Return a text that is equal for equal values."""
    return json.dumps(value, sort_keys=True, default=str)


def _set_labels(rows: Sequence[Row]) -> None:
    """Set the settings in which models of one name differ as their labels.

    A setting that only some of these models have is a difference. Settings that repeat the model's
    seed are dropped, because the seed has its own column.
    """
    by_name = grouped(rows, lambda row: (row.suite, row.merger, row.name)).values()
    for named_rows in by_name:
        for key in {k for row in named_rows for k in row.point if k.split(".")[-1] == "seed"}:
            if all(row.point.get(key, row.seed) == row.seed for row in named_rows):
                for row in named_rows:
                    row.point.pop(key, None)
    differing = dict.fromkeys(key for named_rows in by_name for key in _differing_keys(named_rows))
    for named_rows in by_name:
        shared = [key for key in differing if any(key in row.point for row in named_rows)]
        for row in named_rows:
            row.labels = {k: label(row.point[k]) if k in row.point else UNSET for k in shared}


def _differing_keys(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the keys in which models of one name differ.

    Digests of inputs and used samples count only if no other key divides the same models: they
    always differ along with the tasks or the number of samples.
    """
    key_values = {
        key: [as_key(row.point[key]) if key in row.point else "" for row in rows]
        for key in dict.fromkeys(key for row in rows for key in row.point)
    }
    derived = {key: key_values.pop(key) for key in (INPUTS, SAMPLES) if key in key_values}
    yield from (key for key, column in key_values.items() if len({*column}) > 1)
    dividing: list[Sequence[str]] = [[""] * len(rows), *key_values.values()]
    for key, column in derived.items():
        if len({*zip(*dividing, column, strict=True)}) > len({*zip(*dividing, strict=True)}):
            yield key
        dividing.append(column)


def label(value: object) -> int | float | str:
    """Return a setting's value as a number or text. Different values get different labels."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or value == UNSET:
        return as_key(value)
    try:
        json.loads(value)
    except ValueError:
        return value
    return as_key(value)  # the text "true" is not the value true


def _drop_copies(rows: Sequence[Row]) -> list[Row]:
    """Merge models of equal settings of which some have a seed and some have none.

    If all scores are equal, the model has no randomness, and the results without a seed stand for
    all. If not, the results without a seed are a model of their own.
    """
    dropped = set[int]()
    alike = grouped(rows, lambda row: as_key([row.suite, row.merger, row.name, row.point]))
    for group in alike.values():
        seedless = [row for row in group if row.seed is None]
        if 0 < len(seedless) < len(group):
            if all(row.tasks and row.scores == group[0].scores for row in group):
                dropped |= {id(row) for row in group if row.seed is not None}
            else:
                seedless[0].labels["seed"] = UNSET
    return [row for row in rows if id(row) not in dropped]


def _check_tests(rows: Iterable[Row]) -> None:
    """Refuse runs of one suite whose tasks or test examples differ."""
    first: dict[str, Row] = {}
    for row in (row for row in rows if row.tasks):
        tests = {key: row.point.get(key) for key in TEST_CONDITIONS if key != "precision"}
        other = first.setdefault(as_key([row.suite, tests]), row)
        one, two = ({task: len((r.correct or {}).get(task, ())) for task in r.tasks}
                    for r in (other, row))  # fmt: skip
        if one.keys() != two.keys() or any(
            one[task] and two[task] and one[task] != two[task] for task in one
        ):
            raise ReportError(
                f"models of {row.suite} have different tasks or test examples: {other.title} has "
                f"{one}, but {row.title} has {two}"
            )


def _labelled_notes(run: Run, labels: Sequence[Mapping[str, object]]) -> Iterator[Note]:
    """Yield a run's notes with the labels that their models share.

    `labels` are those of the run's models, in order.
    """
    for note in run.notes:
        rows = [pair for pair in zip(run.rows, labels, strict=True)
                if note.merger in ("", pair[0].merger)]  # fmt: skip
        named = [row_labels for row, row_labels in rows if row.name == note.row]
        first, *others = named or [row_labels for row, row_labels in rows if row.is_repair] or [{}]
        shared = {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}
        yield replace(note, point=", ".join(label_texts(shared)))


def _version_notes(runs: Iterable[Run]) -> Iterator[Note]:
    """Yield a note on each package of which the runs used several versions, and on devices."""
    for name, versions in _mixed_versions(runs).items():
        yield Note(NOTE, f"runs used different versions of {name}: {', '.join(versions)}")
    devices = {run.device.get("accelerator") or run.device.get("cpu") for run in runs} - {None}
    if len(devices) > 1:
        text = f"runs used different devices: {', '.join(sorted(map(str, devices)))}"
        yield Note(NOTE, f"{text}. Their times are not comparable")
