"""Several runs (seeds, upstream mergers, model pools) in one summary of the long table."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np

from fusion_bench_featcal.files import ReportError

from .find import FailedCell
from .items import (
    ITEMS_FILE,
    Interval,
    Scores,
    half_of,
    over_seeds,
    paired_difference,
    recovered_gap_interval,
)
from .long_table import (
    ACCURACY,
    AVERAGE,
    BASE,
    COMPARISON_SEED,
    CORRECT,
    EXPERTS,
    LOSS,
    NORMALISED,
    UNAVAILABLE,
    LongTable,
    RowKey,
    is_repair,
    normalised_average,
    recovered_share,
    samples_range,
    worst_task,
)
from .notes import RECORD, Note
from .run_rows import RunRows

_SEED_SETTING = "seed"


@dataclass(frozen=True, kw_only=True)
class SummaryRow:
    """One row name on one upstream merger of one suite, over all runs that have it."""

    suite: str
    upstream: str | None  # the merger's row; None where the runs had no merged model
    name: str
    run_seeds: list[dict[str, int | None]]  # one entry a run
    seeds: list[int]  # of the row itself; empty where it has none
    accuracy: dict[str, float]  # task (and `average`) -> mean over runs, 0..1
    deviation: dict[str, float] | None  # standard deviations over runs (n - 1); None for one run
    # Against the merger and the experts, from the means over the same runs; intervals are those of
    # `over_seeds`, None for one run without items.
    gain: float | None
    gain_interval: Interval | None
    recovered_gap: float | None
    recovered_gap_interval: Interval | None
    cost: dict[str, Any]  # the mean where all runs have a number, else a text they agree on
    worst_task: str | None  # None for references
    worst_recovered_gap: float | None
    loss: dict[str, float]  # task (and `average`) -> mean, for those with a loss in every run
    normalised: float | None  # mean over tasks of accuracy / the expert's; None without experts
    spread: dict[str, float]  # deviations over runs of `normalised` and of costs; {} for one run
    samples: str  # per task with their split, such as `256 train`; "" for none

    @property
    def tasks(self) -> list[str]:
        """Task names, without the average."""
        return [task for task in self.accuracy if task != AVERAGE]

    @property
    def worst(self) -> tuple[str, float | None] | None:
        """The worst task and the share of its gap recovered; None for references."""
        return (self.worst_task, self.worst_recovered_gap) if self.worst_task else None

    def half_width(self, deviation: float | None) -> float | None:
        """Half of the 95 % interval of a mean over the row's runs, from its deviation."""
        return None if deviation is None else half_of(deviation, len(self.run_seeds))

    @property
    def is_reference(self) -> bool:
        """True for the base and the experts, which belong to no merger."""
        return self.name in (BASE, EXPERTS)

    @property
    def is_repair(self) -> bool:
        """True for what was made of a merged model."""
        return is_repair(self.name, self.upstream)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Rows by suite, upstream merger and name, and what a reader must know about them."""

    rows: list[SummaryRow]  # in the order of the runs
    runs: list[str]  # their folders
    notes: list[Note]
    seeds: list[int] = field(default_factory=list)  # of the comparisons, where they are known
    failed: list[FailedCell] = field(default_factory=list)
    # Flags per test item of every run, by seed, of rows that have them.
    scores: dict[RowKey, dict[Any, Scores]] = field(default_factory=dict, repr=False)

    @property
    def suites(self) -> list[str]:
        """Names of the suites, in the order of the runs."""
        return list(dict.fromkeys(row.suite for row in self.rows))

    def displayed(self, suite: str) -> list[SummaryRow]:
        """References first and once, if all mergers agree on them; then merger by merger."""
        rows = [row for row in self.rows if row.suite == suite]
        references: dict[tuple[Any, ...], SummaryRow] = {}
        for row in rows:
            if row.is_reference:
                references.setdefault((row.name, *row.accuracy.values()), row)
        order = sorted(references.values(), key=lambda row: row.name != BASE)
        others = [row for row in rows if not row.is_reference]
        # The merger comes before what repairs it, whatever order the report had.
        mergers = list(dict.fromkeys(row.upstream for row in others))
        others.sort(key=lambda row: (mergers.index(row.upstream), row.name != row.upstream))
        return order + others


class _Run(NamedTuple):
    path: Path
    report: RunRows


def summarise_reports(
    reports: Mapping[Path, RunRows], failed: Sequence[FailedCell] = ()
) -> Summary:
    """Average what belongs together.

    Args:
        reports: Folder of a run -> its report.
        failed: Cells of comparisons without a result.

    Raises:
        ReportError: Runs of one suite have other tasks or test sets, a row was made with other
            settings, or two runs with the same seeds disagree. The message shows the difference.
    """
    runs = [_Run(path, report) for path, report in reports.items()]
    first: dict[str, _Run] = {}
    for run in runs:
        _check_test_sets(first.setdefault(run.report.suite, run), run)
    table = LongTable(entry for run in runs for entry in run.report.entries())
    # For runs without experts: those of another merger.
    experts = {key[0]: key for key in reversed(table.rows()) if key[2] == EXPERTS}
    return Summary(
        rows=[
            _summary_row(table, key, _distinct(key, runs), experts.get(key[0]))
            for key in table.rows()
        ],
        runs=[str(run.path) for run in runs],
        notes=_notes(runs),
        seeds=_each_once(run.report.seeds.get(COMPARISON_SEED) for run in runs),
        failed=list(failed),
        scores=_scores(table),
    )


def _scores(table: LongTable) -> dict[RowKey, dict[Any, Scores]]:
    """Flags by row, seed and task; references, which mergers share, once for each suite."""
    scores: dict[RowKey, dict[Any, Scores]] = {}
    for key in table.rows():
        seeds = table.seeds(key)
        flags = table.values(key, CORRECT, seeds)
        suite, _, name = key
        place = (suite, None, name) if name in (BASE, EXPERTS) else key
        complete = set(flags) == set(table.values(key, ACCURACY, seeds)) - {AVERAGE}
        if flags and complete:
            by_seed = scores.setdefault(place, {})
            for run, seed in enumerate(map(_run_seed, seeds)):
                by_seed.setdefault(seed, {task: arrays[run] for task, arrays in flags.items()})
    return scores


def _run_seed(text: str) -> Any:
    """Seed of all rows of a run: the comparison's or their only one, else `text`; None for none."""
    seeds = json.loads(text)
    numbers = {seeds.get(COMPARISON_SEED)} - {None} or {*seeds.values()} - {None}
    return text if len(numbers) > 1 else next(iter(numbers), None)


def _each_once(seeds: Iterable[int | None]) -> list[int]:
    return [seed for seed in dict.fromkeys(seeds) if seed is not None]


# ---- what may be averaged


def _check_test_sets(first: _Run, run: _Run) -> None:
    suite, tasks, others = run.report.suite, first.report.tasks, run.report.tasks
    if set(tasks) != set(others):
        raise ReportError(
            f"runs of {suite} have different tasks: {_difference(first, tasks, run, others)}"
        )
    for task, test_set in first.report.test_sets.items():
        for key, value in run.report.test_sets.get(task, {}).items():
            if test_set.get(key, value) != value:
                raise ReportError(
                    f"runs of {suite} have different test sets for task '{task}', {key}: "
                    f"{_difference(first, test_set[key], run, value)}"
                )


def _distinct(key: RowKey, runs: Sequence[_Run]) -> list[RunRows]:
    """Return the reports with a row, a repeated run once; check that they may be averaged."""
    suite, merger, name = key
    places = [run for run in runs if (run.report.suite, run.report.upstream) == (suite, merger)]
    having = [run for run in places if name in run.report.rows]
    distinct: dict[str, _Run] = {}
    for run in having:
        _check_settings(name, having[0], run)
        twin = distinct.setdefault(run.report.seeds_key, run)
        one, two = (each.report.rows[name] for each in (twin, run))
        if one != two:
            raise ReportError(
                f"row '{name}' differs between two runs with the same seeds "
                f"{run.report.seeds_key}: average "
                f"{_difference(twin, one[AVERAGE], run, two[AVERAGE])}. "
                "Give only one of them, or runs with different seeds."
            )
    return [run.report for run in distinct.values()]


def _check_settings(name: str, first: _Run, run: _Run) -> None:
    one, two = (_without_seeds(each.report.settings.get(name, {})) for each in (first, run))
    for key in sorted(set(one) | set(two)):
        if one.get(key) != two.get(key):
            raise ReportError(
                f"row '{name}' was made with different {key}: "
                f"{_difference(first, one.get(key), run, two.get(key))}. "
                "Only the seed may differ between runs that are averaged."
            )


def _without_seeds(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name, without seeds: methods that are applied in order nest theirs."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _without_seeds(value, f"{prefix}{key}.")
        elif key != _SEED_SETTING:
            flat[f"{prefix}{key}"] = value
    return flat


def _difference(first: _Run, one: Any, second: _Run, two: Any) -> str:
    return f"{one} in {first.path}, {two} in {second.path}"


def _notes(runs: Sequence[_Run]) -> list[Note]:
    """Notes of the runs, each with its mergers (and suites) where there are several."""
    are_alike = len({run.report.suite for run in runs}) == 1
    having: dict[Note, dict[str, None]] = {}
    names = set()
    for run in runs:
        merger = run.report.upstream or "without merger"
        name = merger if are_alike else f"{run.report.suite}, {merger}"
        names.add(name)
        for note in run.report.notes:
            having.setdefault(replace(note, merger=""), {})[name] = None
    every = "" if len(names) == 1 else "all mergers" if are_alike else "all runs"
    notes = [
        replace(note, merger="; ".join(named) if len(named) < len(names) else every)
        for note, named in having.items()
    ]
    return notes + [Note(RECORD, text) for text in _differing_records(runs)]


def _differing_records(runs: Sequence[_Run]) -> list[str]:
    """Return sentences on runs without flags per test item, and on versions that differ."""
    texts = []
    without = [str(run.path) for run in runs if not run.report.items]
    if without:
        where = f": {', '.join(without)}" if len(runs) > 1 else ""
        texts.append(f"no interval over items for rows without {ITEMS_FILE}{where}")
    for package in dict.fromkeys(package for run in runs for package in run.report.versions):
        numbers = sorted({run.report.versions.get(package, "not recorded") for run in runs})
        if "/" in package and "not recorded" in numbers:  # of the hub, which earlier runs left out
            numbers.remove("not recorded")
        if len(numbers) > 1:
            texts.append(f"runs used different versions of {package}: {', '.join(numbers)}")
    return texts


# ---- one row


def _summary_row(
    table: LongTable, key: RowKey, reports: Sequence[RunRows], other_experts: RowKey | None
) -> SummaryRow:
    suite, upstream, name = key
    seeds = table.seeds(key)
    accuracy = table.values(key, ACCURACY, seeds)
    shares = _normalised(table, key, seeds, other_experts)
    costs = table.costs(key, seeds)
    numbers = {what: values for what, values in costs.items() if _are_numbers(values)}
    drawn = (entry for report in reports for entry in report.samples.get(name, {}).values())
    return SummaryRow(
        suite=suite,
        upstream=upstream,
        name=name,
        run_seeds=[report.seeds for report in reports],
        seeds=_each_once(report.seeds.get(name) for report in reports),
        accuracy=_means(accuracy),
        deviation=_deviations(accuracy) if len(seeds) > 1 else None,
        **_against_merger(table, key, seeds),
        cost={what: _common_text(values) for what, values in costs.items()} | _means(numbers),
        loss=_means(table.values(key, LOSS, seeds)),
        normalised=fmean(shares) if len(shares) == len(seeds) else None,
        spread={
            what: stdev(values)
            for what, values in {NORMALISED: shares, **numbers}.items()
            if len(values) > 1
        },
        samples=" ".join(samples_range(drawn)),
    )


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: float(np.mean(numbers)) for task, numbers in values.items()}


def _deviations(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {task: float(np.std(numbers, ddof=1)) for task, numbers in values.items()}


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def _common_text(values: Sequence[Any]) -> str:
    texts = {str(value) for value in values}
    return texts.pop() if len(texts) == 1 else UNAVAILABLE


def _against_merger(table: LongTable, key: RowKey, seeds: Sequence[str]) -> dict[str, Any]:
    """Gain, recovered gap and worst task over the same runs, with their intervals."""
    suite, upstream, name = key
    keys = [(suite, upstream, row or "") for row in (name, upstream, EXPERTS)]
    row, merged, experts = (_means(table.values(key, ACCURACY, seeds)) for key in keys)
    flags, merged_flags, expert_flags = (
        {task: np.stack(arrays) for task, arrays in table.values(key, CORRECT, seeds).items()}
        for key in keys
    )
    of_row, of_merged, of_experts = (
        table.values(key, ACCURACY, seeds).get(AVERAGE, []) for key in keys
    )
    gain = share = worst = gain_interval = share_interval = None
    several = len(seeds) > 1
    if merged:
        gain = row[AVERAGE] - merged[AVERAGE]
        gains = [one - other for one, other in zip(of_row, of_merged, strict=True)]
        items = paired_difference(flags, merged_flags) if flags and merged_flags else None
        gain_interval = over_seeds(gain, gains, items) if items or several else None
        if is_repair(name, upstream):
            worst = worst_task(row, merged, experts or None)
    if merged and experts:
        share = recovered_share(row[AVERAGE], merged[AVERAGE], experts[AVERAGE])
        by_seed = map(recovered_share, of_row, of_merged, of_experts)
        shares = [value for value in by_seed if value is not None]
        known = flags and merged_flags and expert_flags
        items = recovered_gap_interval(flags, merged_flags, expert_flags) if known else None
        if share is not None and len(shares) == len(seeds) and (items or (several and not known)):
            share_interval = over_seeds(share, shares, items)
    return {
        "gain": gain,
        "gain_interval": gain_interval,
        "recovered_gap": share,
        "recovered_gap_interval": share_interval,
        "worst_task": worst and worst[0],
        "worst_recovered_gap": worst and worst[1],
    }


def _normalised(
    table: LongTable, key: RowKey, seeds: Sequence[str], other_experts: RowKey | None
) -> list[float]:
    """Normalised average of each run, where it has one."""
    other = other_experts and table.values(other_experts, ACCURACY, table.seeds(other_experts))
    shares = []
    for seed in seeds:
        row = _means(table.values(key, ACCURACY, [seed]))
        experts = _means(table.values((*key[:2], EXPERTS), ACCURACY, [seed]) or other or {})
        shares.append(normalised_average(row, experts or None))
    return [share for share in shares if share is not None]
