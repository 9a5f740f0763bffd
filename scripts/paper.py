"""Tables of numbers from the FeatCal paper (arXiv 2605.13030) and from the bundled suites."""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from math import hypot
from pathlib import Path
from statistics import fmean
from typing import Any

from fusion_bench_featcal.lab.diagnosis.views import by_block, by_task, rows_of
from fusion_bench_featcal.results.lines import LINES_FILE, Line, read_lines

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
MERGERS = ("simple_average", "task_arithmetic", "adamerging", "wudi")
METHODS = {"+ Surgery": "surgery", "+ ProbSurgery": "prob_surgery", "+ FeatCal": "featcal"}
B32 = "clip-vit-base-patch32_TA8"
# Suite -> its comparison in docs/results, and the row with the paper's settings for its model.
OURS = {"clip-vit-mini_TA6": ("grid", "featcal"),
        "flan-t5-mini_TA6": ("flan-t5-mini", "featcal_paper_flan_t5"),
        "llama-mini_TA6": ("llama-mini", "featcal_paper_llama_3b-targets")}  # fmt: skip
MERGED = "the merged model"
HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    rule = "|".join([":--", *["--:"] * (len(heads) - 1)])
    head, *rest = (f"| {' | '.join(row)} |" for row in [heads, *lines])
    return "\n".join([head, f"|{rule}|", *rest])


def read(*path: str) -> Any:
    """Return the content of a JSON file below docs/results."""
    return json.loads(RESULTS.joinpath(*path).read_text(encoding="utf-8"))


@cache
def published() -> dict[tuple[str, str, str, str], str]:
    """Return the paper's values by setting, merger, post-merging method and metric."""
    with (ROOT / "scripts" / "paper_results.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row["setting"], row["upstream"], row["post_merging"], row["metric"]): row["value"]
            for row in csv.DictReader(file)
        }


def average(setting: str, name: str, merger: str = "task_arithmetic") -> str:
    """Return a published average accuracy, or a dash."""
    return published().get((setting, merger, name, "average"), "-")


def averages_table() -> str:
    """Average accuracy of mergers and post-merging methods: the paper's suites, then ours."""
    suites = dict.fromkeys(suite for suite, merger, *_ in published() if merger in MERGERS)
    lines = [
        [suite, merger, average(suite, "", merger),
         *(average(suite, name, merger) for name in METHODS.values()), "",
         average(suite, "experts", "")]
        for suite in suites for merger in MERGERS if average(suite, "", merger) != "-"
    ]  # fmt: skip
    for suite, (folder, featcal) in OURS.items():
        rows = read("comparison", f"{folder}.json")["rows"]
        values = {(row["upstream"], row["name"]): 100 * row["accuracy"]["average"] for row in rows}
        experts = next(value for (_, name), value in values.items() if name == "experts")
        for merger in (merger for merger in MERGERS if (merger, merger) in values):
            names = (merger, "surgery", "prob_surgery", featcal, "featcal_plus")
            cells = [f"{value:.1f}" for value in (*(values[merger, n] for n in names), experts)]
            lines.append([f"**{suite}**", merger, *cells])
    return table(["suite", "merger", "merged", *METHODS, "+ FeatCal+", "experts"], lines)


def samples_table() -> str:
    """Accuracy by samples per task over task arithmetic, the paper's and ours."""
    names, ours = [*METHODS.values(), "featcal_plus"], _points("samples", "clip-vit-mini_TA6")
    lines = []
    for count in (8, 16, 32, 64, 128, 256, 512):
        paper = [average(f"{B32} n={count}", name) for name in METHODS.values()]
        rows = ours.get((("samples_per_task", count),), {})
        lines.append([str(count), *paper, *(percent(rows.get(name)) for name in names)])
    heads = [f"paper: {head[2:]}" for head in METHODS]
    heads += [f"ours: {head[2:]}" for head in (*METHODS, "+ FeatCal+")]
    return table(["samples per task", *heads], lines)


def corruption_table() -> str:
    """Accuracy after calibration on corrupted images, the paper's and ours."""
    kinds = ("clean", "gaussian_noise", "motion_blur", "fog")
    ours = _points("corruption", "clip-vit-mini_TA6")
    lines = [
        [f"paper: {head}", *(average(f"{B32} corrupted={kind}", name) for kind in kinds)]
        for head, name in METHODS.items()
    ]
    for head, name in METHODS.items():
        points = [(("corruption", k), ("severity", 0 if k == "clean" else 3)) for k in kinds]
        lines.append([f"ours: {head}", *(percent(ours[point].get(name)) for point in points)])
    return table(["", *(kind.replace("_", " ") for kind in kinds)], lines)


def cost_table() -> str:
    """Costs of a calibration: the paper's on one A800, ours on two cores."""
    values, setting = published(), f"{B32} cost n=256, one A800"
    rows = read("comparison", "costs.json")["rows"]
    ours = {row["name"]: row["cost"] for row in rows}
    lines = []
    for head, name in METHODS.items():
        metrics = ("seconds", "gpu_energy_wh", "peak_host_rss_gib")
        cost = ours[name if name == "featcal" else f"{name}_recompute"]
        lines.append(
            [head, *(values[setting, "task_arithmetic", name, metric] for metric in metrics),
             f"{cost['seconds']:.1f}", f"{cost['peak_rss_bytes'] / 2**30:.2f}"]
        )  # fmt: skip
    return table(
        ["", "paper: seconds", "paper: GPU energy, Wh", "paper: host memory, GiB", "ours: seconds",
         "ours: host memory, GiB"], lines,
    )  # fmt: skip


# ---- observations: a row is above, below or level with another (within a point)

Side = tuple[str, Mapping[str, Any]]  # a row, and labels in which its point differs from the first


def _samples() -> Iterator[tuple[Side, str, Side, float]]:
    def at(row: str, count: int) -> Side:
        return row, {"samples_per_task": count}

    for row, relation, gain in (("featcal", "above", 15.4), ("surgery", "below", -1.3),
                                ("prob_surgery", "below", -4.1)):  # fmt: skip
        yield at(row, 8), relation, at(MERGED, 8), gain
    for count, other, gains in ((8, 8, (16.7, 19.5)), (8, 512, (5.1, 2.2)), (512, 512, (7.7, 4.8))):
        for name, gain in zip(("surgery", "prob_surgery"), gains, strict=True):
            yield at("featcal", count), "above", at(name, other), gain
    yield at("featcal", 512), "above", at("featcal", 8), 2.6


def _corruption() -> Iterator[tuple[Side, str, Side, float]]:
    for kind, fall, gains in (("gaussian_noise", -8.9, (9.1, 4.2, 3.4)),
                              ("motion_blur", -11.3, (6.7, 6.7, 8.4)),
                              ("fog", -9.9, (8.1, 6.2, 7.4))):  # fmt: skip
        labels = {"corruption": kind, "severity": 3}
        featcal = ("featcal", labels)
        yield featcal, "below", ("featcal", {"corruption": "clean", "severity": 0}), fall
        for row, gain in zip((MERGED, "surgery", "prob_surgery"), gains, strict=True):
            yield featcal, "above", (row, labels), gain


def _sweep() -> Iterator[tuple[Side, str, Side, None]]:
    for setting, value, relation, other in (
        ("ridge_lambda", 0.01, "level with", 0.05), ("ridge_lambda", 10, "below", 0.05),
        ("mix_alpha", 1, "below", 0.3), ("mix_alpha", 0.3, "above", 0),
        ("anchor_rho", 2, "above", 1), ("anchor_rho", 4, "below", 2),
    ):  # fmt: skip
        yield ("featcal", {setting: value}), relation, ("featcal", {setting: other}), None


OBSERVATIONS: dict[str, tuple[str, Sequence[tuple[Side, str, Side, float | None]]]] = {
    "samples": ("Table 12", [*_samples()]),
    "corruption": ("Table 6", [*_corruption()]),
    "sweep": ("Figure 5", [*_sweep()]),
    "ablation": ("Section 5", [
        (("featcal_no_bias_no_norm", {}), "level with", ("featcal", {}), None)
    ]),
}  # fmt: skip


def observations_part(folder: Path = RESULTS / "studies") -> str:
    """Return a table of observations for each study that has results in `folder`."""
    tables = []
    for name, (source, observations) in OBSERVATIONS.items():
        paths = sorted([*folder.glob(f"*/{name}.json"), *folder.glob(f"{name}/*/report.json")])
        studies = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        lines = [
            [f"{_side(one)} is {relation} {_side(other)}",
             "-" if value is None else f"{value:+.1f}",
             *(_cell(study, one, relation, other) for study in studies)]
            for one, relation, other, value in observations
        ]  # fmt: skip
        if studies:
            suites = [study["suite"] for study in studies]
            tables.append(table([f"{source}: points", "paper", *suites], lines))
    return "\n\n".join(tables)


def _side(side: Side) -> str:
    row, labels = side
    point = ", ".join(f"{key} = {value}" for key, value in labels.items())
    point = point.replace("samples_per_task", "n").replace("corruption = ", "")
    return f"{row} ({point})" if point else row


def _cell(study: Mapping[str, Any], one: Side, relation: str, other: Side) -> str:
    """Return the difference with its interval and the verdict, or a dash for a missing row."""
    difference = _difference(_row(study, one), _row(study, other))
    if difference is None:
        return "-"
    value, low, high = (100 * number for number in difference)
    return f"{value:+z.1f} [{low:+z.1f}, {high:+z.1f}] {verdict(low, high, relation)}"


def _row(study: Mapping[str, Any], side: Side) -> dict[str, Any] | None:
    name, labels = side
    labels = {**study["points"][0]["labels"], **labels}
    rows = (row for point in study["points"] if point["labels"] == labels for row in point["rows"])
    return next(
        (row for row in rows if row["name"] == (row["upstream"] if name == MERGED else name)), None
    )


def _difference(
    one: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> tuple[float, float, float] | None:
    """Return the difference of two rows of a study, with its interval.

    If the study compares them, its interval is used. Otherwise it treats their gains over the
    merged model as independent, so the interval is wider than a paired one.
    """
    if one is None or other is None or one["difference"] is None:
        return None
    gains = [one["difference"], other["difference"] or {}]  # the merged model's may be none
    (value, low, high), (level, least, most) = (
        [gain.get(key, 0.0) for key in ("estimate", "low", "high")] for gain in gains
    )
    if one["against"] == other["name"]:
        return value, low, high
    if {one["against"], other["against"]} != {one["upstream"]}:
        return None
    difference = value - level
    return (
        difference,
        difference - hypot(value - low, most - level),
        difference + hypot(high - value, level - least),
    )


def verdict(low: float, high: float, relation: str) -> str:
    """Judge an interval in points. "level with" means within a point."""
    if relation == "level with":
        return HOLDS if low >= -1 and high <= 1 else FAILS if low > 1 or high < -1 else OPEN
    if relation == "below":
        low, high = -high, -low
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def drift_table() -> str:
    """Figures 1 and 2: drift and cosine of every diagnosis, calibrated and merged."""
    lines = []
    for folder in sorted((RESULTS / "diagnosis").iterdir()):
        diagnosis = read_lines(folder / LINES_FILE)
        repairs = [row for row in rows_of(diagnosis) if row not in ("base", _merger(diagnosis))]
        cells = {row: _drift_cells(diagnosis, row) for row in repairs}
        lines += [[folder.name, row, *values] for row, values in cells.items()]
    heads = ["drift at the last block", "cosine to the expert", "tasks nearer to the expert",
             "tasks with task vectors farther", "tasks with opposite gains"]  # fmt: skip
    paper = ["the paper, ViT-B/32", "featcal", "-46 % (Cars)", "0.60 to 0.84 (Cars)", "-",
             "8 of 8", "3 of 8"]  # fmt: skip
    return table(["suite", "row", *heads], [paper, *lines])


def _merger(lines: Sequence[Line]) -> str:
    return next(line["merger"] for line in lines if line["merger"])


def _drift_cells(lines: Sequence[Line], row: str) -> list[str]:
    rows = row, _merger(lines)
    after, before = (by_task(lines, name, "final_cosine") for name in rows)
    vectors, merged_vectors = (by_task(lines, name, "task_vector_cosine") for name in rows)
    accuracy, merged_accuracy = (by_task(lines, name, "accuracy") for name in rows)
    last, merged_last = ([*by_block(lines, name, "relative").values()][-1] for name in rows)
    opposite = sum(
        (after[task] - before[task]) * (accuracy[task] - merged_accuracy[task]) < 0
        for task in after
    )
    return [
        f"{100 * (last / merged_last - 1):+.0f} %",
        f"{fmean(before.values()):.3f} to {fmean(after.values()):.3f}",
        f"{sum(after[task] > before[task] for task in after)} of {len(after)}",
        f"{sum(vectors[task] < merged_vectors[task] for task in vectors)} of {len(vectors)}",
        f"{opposite} of {len(after)}",
    ]


def _points(name: str, suite: str) -> dict[tuple[tuple[str, Any], ...], dict[str, float]]:
    """Return a study's average accuracies by point and row."""
    return {
        tuple(point["labels"].items()): {
            row["name"]: row["accuracy"]["average"] for row in point["rows"]
        }
        for point in read("studies", suite, f"{name}.json")["points"]
    }


def percent(value: float | None) -> str:
    """Return a share in per cent, or a dash."""
    return "-" if value is None else f"{100 * value:.1f}"
