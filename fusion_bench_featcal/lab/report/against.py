"""Differences of all rows from one, on the terminal: `featcal report RUN --against ROW`."""

from collections.abc import Iterable, Mapping

from fusion_bench_featcal.results.intervals import LEVEL
from fusion_bench_featcal.results.long_table import AVERAGE, RowKey
from fusion_bench_featcal.results.summary import Summary, SummaryRow
from fusion_bench_featcal.results.tables import console, print_page, titled

from .differences import (
    BySeed,
    Difference,
    against,
    difference_grid,
    find_row,
    over_suites,
    row_name,
)


def show_against(summary: Summary, name: str) -> None:
    """Print every row's difference from one row, with Holm's correction over all printed ones.

    Runs of several suites are compared over suites, so that the interval covers new trainings.

    Raises:
        ReportError: If no row or several have the name, or a suite lacks the row.
    """
    if len(summary.suites) > 1:
        _show_over_suites(summary, name)
        return
    [suite], width = summary.suites, console().width
    suite_differences = against(summary.scores, name)
    sentence = (
        f"average accuracy minus that of {name}, in points; its {100 * LEVEL:.0f} % interval over "
        "test items (paired bootstrap) and, where both rows have several in common, seeds "
        "(Student's t), and p-values with Holm's correction over these rows"
    )
    grid = difference_grid(suite_differences, name)
    lines = [sentence, *_seed_lines(summary.scores, suite_differences, name)]
    print_page(list(titled(f"{suite}: differences", grid.split(width))), lines)


def _seed_lines(
    scores: Mapping[RowKey, BySeed], suite_differences: Iterable[Difference], name: str
) -> list[str]:
    """Return sentences on rows with only one seed, or none, in common with the named row."""
    common = {difference.row: len(difference.seeds) for difference in suite_differences}
    reference = find_row(scores, name)
    several = [key for key in common if max(len(scores[key]), len(scores[reference])) > 1]
    one = [row_name(key) for key in several if common[key] == 1]
    none = [row_name(key) for key in scores if key not in common and key != reference]
    lines = [f"one seed in common with {name}, intervals are given the seed: {', '.join(one)}"]
    more = [f"left out, without a seed in common with {name}: {', '.join(none)}"]
    return lines * bool(one) + more * bool(none)


def _show_over_suites(summary: Summary, name: str) -> None:
    averages, suites = averages_of(summary.rows), summary.suites
    grid = difference_grid(over_suites(averages, name), name)
    partly = {
        row_name(key): None
        for key in averages
        if any((suite, *key[1:]) not in averages for suite in suites)
    }
    sentence = (
        f"average accuracy minus that of {name}, in points: mean over {len(suites)} suites, the "
        f"{100 * LEVEL:.0f} % interval and p-values of Student's distribution with Holm's "
        "correction over these rows. They tell how the mean would vary over further suites like "
        "these, if each is a training of its own"
    )
    more = [f"rows that some suites lack are left out: {', '.join(partly)}"] if partly else []
    tables = titled("differences over suites", grid.split(console().width))
    print_page(list(tables), [sentence, *more])


def averages_of(rows: Iterable[SummaryRow]) -> dict[RowKey, float]:
    """Return the average accuracy of each row. References of all mergers appear once per suite."""
    averages: dict[RowKey, float] = {}
    for row in rows:
        upstream = None if row.is_reference else row.upstream
        averages.setdefault((row.suite, upstream, row.name), row.accuracy[AVERAGE])
    return averages
