"""Several runs: checks before averaging them, and their notes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusion_bench_featcal.files import ReportError

from .items import ITEMS_FILE
from .long_table import AVERAGE, RowKey
from .notes import RECORD, Note
from .run_rows import RunRows

_SEED_SETTING = "seed"
_Run = tuple[Path, RunRows]


def check_averages(reports: Mapping[Path, RunRows]) -> None:
    """Refuse runs that must not be averaged.

    Raises:
        ReportError: If runs of one suite have different tasks or test sets, a row has different
            settings, or two runs with equal seeds disagree. The message shows the difference.
    """
    suites: dict[str, _Run] = {}
    rows: dict[RowKey, _Run] = {}
    twins: dict[tuple[RowKey, str], _Run] = {}
    for run in reports.items():
        _, report = run
        _check_test_sets(suites.setdefault(report.suite, run), run)
        for name in report.rows:
            key = (report.suite, report.upstream, name)
            _check_settings(name, rows.setdefault(key, run), run)
            _check_twin(name, twins.setdefault((key, report.seeds_key), run), run)


def _check_test_sets(first: _Run, run: _Run) -> None:
    suite, tasks, run_tasks = run[1].suite, first[1].tasks, run[1].tasks
    if set(tasks) != set(run_tasks):
        raise ReportError(
            f"runs of {suite} have different tasks: {_difference(first, tasks, run, run_tasks)}"
        )
    for task, test_set in first[1].test_sets.items():
        for key, value in run[1].test_sets.get(task, {}).items():
            if test_set.get(key, value) != value:
                raise ReportError(
                    f"runs of {suite} have different test sets for task '{task}', {key}: "
                    f"{_difference(first, test_set[key], run, value)}"
                )


def _check_twin(name: str, twin: _Run, run: _Run) -> None:
    one, two = (report.rows[name] for _, report in (twin, run))
    if one != two:
        raise ReportError(
            f"row '{name}' differs between two runs with the same seeds {run[1].seeds_key}: "
            f"average {_difference(twin, one[AVERAGE], run, two[AVERAGE])}. "
            "Give only one of them, or runs with different seeds."
        )


def _check_settings(name: str, first: _Run, run: _Run) -> None:
    one, two = (_without_seeds(report.settings.get(name, {})) for _, report in (first, run))
    for key in sorted(set(one) | set(two)):
        if one.get(key) != two.get(key):
            raise ReportError(
                f"row '{name}' was made with different {key}: "
                f"{_difference(first, one.get(key), run, two.get(key))}. "
                "Only the seed may differ between runs that are averaged."
            )


def _without_seeds(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted name, without seeds. Chained methods have nested settings."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _without_seeds(value, f"{prefix}{key}.")
        elif key != _SEED_SETTING:
            flat[f"{prefix}{key}"] = value
    return flat


def _difference(first: _Run, one: Any, second: _Run, two: Any) -> str:
    return f"{one} in {first[0]}, {two} in {second[0]}"


def notes_of_runs(reports: Mapping[Path, RunRows]) -> list[Note]:
    """Return the notes of the runs, each with its mergers (and suites) if there are several."""
    runs = list(reports.items())
    are_alike = len({report.suite for _, report in runs}) == 1
    having: dict[Note, dict[str, None]] = {}
    names = set()
    for _, report in runs:
        merger = report.upstream or "without merger"
        name = merger if are_alike else f"{report.suite}, {merger}"
        names.add(name)
        for note in report.notes:
            having.setdefault(replace(note, merger=""), {})[name] = None
    everywhere = "" if len(names) == 1 else "all mergers" if are_alike else "all runs"
    notes = [
        replace(note, merger="; ".join(named) if len(named) < len(names) else everywhere)
        for note, named in having.items()
    ]
    return notes + [Note(RECORD, text) for text in _differing_records(runs)]


def _differing_records(runs: Sequence[_Run]) -> list[str]:
    """Return sentences on runs without flags per test item, and on differing versions."""
    texts = []
    without = [str(path) for path, report in runs if not report.items]
    if without:
        where = f": {', '.join(without)}" if len(runs) > 1 else ""
        texts.append(f"no interval over items for rows without {ITEMS_FILE}{where}")
    for package in dict.fromkeys(package for _, report in runs for package in report.versions):
        numbers = sorted({report.versions.get(package, "not recorded") for _, report in runs})
        if "/" in package and "not recorded" in numbers:  # a hub model, which earlier runs left out
            numbers.remove("not recorded")
        if len(numbers) > 1:
            texts.append(f"runs used different versions of {package}: {', '.join(numbers)}")
    return texts
