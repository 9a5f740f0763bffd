"""Differences of all models from one model."""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fusion_bench_featcal.errors import ReportError

from .frame import FrameLine, frame_of, paired, share_tests
from .joining import Results
from .statistics import difference, holm

_COLUMNS = ("suite", "row", "difference", "half", "seeds", "p", "adjusted")


def against(results: Results, name: str, metric: str | None = None) -> Any:
    """Return every model's difference from one model, with Holm's correction over all of them.

    Args:
        results: Joined runs of one point. Each suite is compared separately.
        name: The model, `merger/name`, or only its name if a single merger has such a model.
        metric: As in `frame_of`.

    Returns:
        A pandas DataFrame with the columns `suite`, `row`, `difference`, `half`, `seeds`, `p` and
        `adjusted`. Models that share no seed or no tests with the named model are left out. `attrs`
        has the `metric`.

    Raises:
        ReportError: If settings differ between models of one name, if the name fits no model or
            several, or if nothing was scored.
    """
    from pandas import DataFrame  # slow to import

    if results.labels:
        raise ReportError(
            "--against compares models with equal settings, but they differ in "
            f"{', '.join(results.labels)}"
        )
    frame = frame_of(results, metric)
    records: list[dict[str, Any]] = []
    if not any(line.values for line in frame.lines):
        raise ReportError("--against: nothing was scored, so there are no models to compare")
    for suite, suite_frame in frame.by_suite().items():
        reference = _find_line(suite_frame.lines, name)
        for line in suite_frame.lines:
            if line is reference or not share_tests(line, reference):
                continue
            compared = difference(*paired(line, reference))
            if compared is not None:
                row = {"suite": suite, "row": line.first.title, "difference": compared.value}
                records.append(row | {key: getattr(compared, key) for key in _COLUMNS[3:6]})
    with_p = [record for record in records if record["p"] is not None]
    for record, adjusted in zip(with_p, holm([record["p"] for record in with_p]), strict=True):
        record["adjusted"] = adjusted
    differences = DataFrame(records, columns=list(_COLUMNS))
    differences.attrs["metric"] = frame.metric
    return differences


def _find_line(lines: Sequence[FrameLine], name: str) -> FrameLine:
    titles = [line.first.title for line in lines]
    matches = [line for line in lines if line.first.title == name]
    matches = matches or [line for line in lines if line.first.name == name]
    if len(matches) != 1:
        choices = [line.first.title for line in matches] or titles
        near = [] if matches else get_close_matches(name, titles, 1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise ReportError(f"--against: name one model, got {name!r}{hint}. There are: {choices}")
    return matches[0]
