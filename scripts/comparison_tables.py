"""Tables of comparisons and runs, from docs/results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import paper
from paper import read, table
from scipy import stats

Row = dict[str, Any]
SUITES = {
    "clip-vit-mini_TA6": "six image tasks",
    "clip-vit-mini_alphabets2": "two alphabets",
    "flan-t5-mini_TA6": "T5, six text tasks",
    "llama-mini_TA6": "Llama, six text tasks",
}
SUITE_ROWS = (
    "merged", "+ surgery_calibration", "+ prob_surgery_calibration", "+ surgery_v2_calibration",
    "+ distillation", "+ featcal", "+ featcal_plus", "experts",
)  # fmt: skip
README_ROWS = {
    "merged": "merged by task arithmetic",
    "+ distillation": "+ gradient distillation",
    "+ featcal": "+ FeatCal, settings of the paper",
    "+ featcal_plus": "+ FeatCal+",
    "experts": "one expert per task",
}
README_COLUMNS = {
    "CLIP, images": "clip-vit-mini_TA6",
    "T5, texts": "flan-t5-mini_TA6",
    "Llama, texts": "llama-mini_TA6",
}
RUNS = ("TA6", "alphabets2", "resnet-mini", "flan-t5-mini", "llama-mini")
MERGER = "task_arithmetic"
REFERENCES = ("base", "experts")


# ---- rows and cells


def rows_of(*path: str) -> list[Row]:
    """Return the rows of a file of results."""
    return [prepared(row) for row in read(*path)["rows"]]


def prepared(row: Row) -> Row:
    """Add a row's label in tables, and half of the interval of its average."""
    half = row.get("half_width") or None  # studies store it
    if row.get("deviation"):
        runs = row["runs"]
        half = stats.t.ppf(0.975, runs - 1) * row["deviation"]["average"] / runs**0.5
    is_merger = row["name"] in (*REFERENCES, row["upstream"])
    head = row["name"] if is_merger else f"+ {row['name']}"
    return row | {"half": half, "head": head, "is_merger": is_merger}


def average(row: Row, best: str = "") -> str:
    """Return an average with half of its interval and, in brackets, the worst task's gap."""
    text = paper.percent(row["accuracy"]["average"])
    bold = "**" * (text == best)
    text = bold + text + (f" ± {paper.percent(row['half'])}" if row["half"] is not None else "")
    return text + bold + (f" ({gap(row)})" if gap(row) else "")


def gap(row: Row) -> str:
    """Return the share of its gap that the worst task recovers, or nothing for mergers."""
    share = row["worst_recovered_gap"]
    return "" if share is None or row["is_merger"] else f"{100 * share:.0f} %"


def worst(row: Row) -> str:
    """Return the worst task and its gap."""
    return f"{short(row['worst_task'])}, {gap(row)}" if gap(row) else "-"


def gain(row: Row, key: str = "gain_interval") -> str:
    """Return a row's difference from another one in points, with its interval."""
    limits = row[key]
    if row["is_merger"] or limits is None:
        return "-"
    value, low, high = (f"{100 * limits[key]:+z.1f}" for key in ("estimate", "low", "high"))
    return f"{value} [{low}, {high}]"


def short(task: str) -> str:
    """Return a task's name without the prefix of the bundled suites."""
    return task.removeprefix("mini_")


def measured(content: Mapping[str, Any]) -> str:
    """Return a line with the machine and the versions of a measurement."""
    device, versions = content["device"], content["versions"]
    return (
        f"- measured on {device['cpu']} ({device['torch_threads']} thread) with torch "
        f"{versions['torch']} and transformers {versions['transformers']}"
    )


# ---- comparisons and runs


def by_merger(name: str) -> tuple[dict[str, list[Row]], list[Row]]:
    """Return a comparison's rows by the mergers that methods ran on, and the other rows."""
    rows = rows_of("comparison", f"{name}.json")
    columns: dict[str, list[Row]] = {row["upstream"]: [] for row in rows if not row["is_merger"]}
    remaining_rows = []
    for row in rows:
        has_no_column = row["name"] in REFERENCES or row["upstream"] not in columns
        (remaining_rows if has_no_column else columns[row["upstream"]]).append(row)
    return columns, remaining_rows


def accuracies(corner: str, columns: Mapping[str, Sequence[Row]], *row_names: str) -> str:
    """Return a table of averages with a column for each comparison or merger, the best bold."""
    cells: dict[str, dict[str, str]] = {}
    task_id = {}
    for column, rows in columns.items():
        values = [row["accuracy"]["average"] for row in rows if row["name"] != "experts"]
        for row in rows:
            head = "merged" if row["head"] == column or row["head"] == MERGER else row["head"]
            cells.setdefault(head, {})[column] = average(row, paper.percent(max(values)))
            task_id[head] = row["cost"].get("task_id_at_inference", "yes")
    names = row_names or sorted(cells, key=lambda head: head == "experts")
    lines = [[n, *(cells[n].get(column, "-") for column in columns), task_id[n]] for n in names]
    return table([corner, *columns, "task id"], lines)


def grid(*names: str) -> str:
    """Return a table of each comparison's mergers, and the remaining rows in a sentence."""
    paragraphs = []
    for columns, remaining_rows in map(by_merger, names):
        paragraphs.append(accuracies("average, % (worst gap)", columns))
        references = ", ".join(f"{row['name']} {average(row)}" for row in remaining_rows)
        paragraphs.append(f"- for comparison: {references}")
    return "\n\n".join(paragraphs)


def draws(columns: Mapping[str, str], *row_names: str) -> str:
    """Return a table of comparisons over task arithmetic with three draws."""
    rows = {
        head: [row for row in rows_of("comparison", f"{name}.json") if row["name"] != "base"]
        for head, name in columns.items()
    }
    return accuracies("mean over draws, % (worst gap)", rows, *row_names)


def suites_table() -> str:
    """Return a few rows on every suite with 64 samples."""
    columns = {head: f"draws-{suite}-n64" for suite, head in SUITES.items()}
    return f"{draws(columns, *SUITE_ROWS)}\n\n{measured(read('comparison', 'grid.json'))}"


def readme_table() -> str:
    """Average accuracies of a few rows on three suites with 64 samples, the best corrected bold."""
    columns = []
    for suite in README_COLUMNS.values():
        rows = {row["head"]: row for row in rows_of("comparison", f"draws-{suite}-n64.json")}
        rows["merged"] = rows[MERGER]
        cells = {name: paper.percent(rows[name]["accuracy"]["average"]) for name in README_ROWS}
        best = max((name for name in README_ROWS if name != "experts"), key=cells.__getitem__)
        columns.append(cells | {best: f"**{cells[best]}**"})
    lines = [[label, *(cells[name] for cells in columns)] for name, label in README_ROWS.items()]
    return table(["accuracy, %", *README_COLUMNS], lines)


def tasks_table(rows: Sequence[Row], **more: Callable[[Row], str]) -> str:
    """Return a table of every task's accuracy, the average and the worst task."""
    tasks = [task for task in rows[0]["accuracy"] if task != "average"]
    columns: dict[str, Callable[[Row], str]] = {
        **{short(task): lambda row, task=task: paper.percent(row["accuracy"][task])
           for task in tasks},
        "average": lambda row: average(row | {"worst_recovered_gap": None}),
        "worst task, its gap": worst, **more,
    }  # fmt: skip
    lines = [[row["head"], *(cell(row) for cell in columns.values())] for row in rows]
    return table(["accuracy, %", *columns], lines)


def grid_tasks() -> str:
    """Every task of the image suite: mergers, and every method over task arithmetic."""
    columns, remaining_rows = by_merger("grid")
    return tasks_table([*remaining_rows, *columns[MERGER]])


def run_table(name: str) -> str:
    """Accuracies of demo-full's runs on a pool, two mergers and three draws."""
    rows = {(row["is_merger"] or row["upstream"], row["head"]): row
            for row in rows_of("runs", f"{name}.json")}  # fmt: skip
    text = tasks_table([*rows.values()], gain=gain)
    return f"{text}\n\n{measured(read('runs', f'{name}.json'))}"


def costs_table() -> str:
    """Costs of every row, each measured in a process."""
    lines = []
    for row in rows_of("comparison", "costs.json"):
        cost = row["cost"]
        inference = f"{1e3 * cost['inference_seconds_per_sample']:.3f}"
        lines.append([row["head"], average(row), *costs(row), inference])
    return table(["", "average, % (worst gap)", "seconds", "memory, MiB", "ms / sample"], lines)


def times_table() -> str:
    """Seconds of methods divided by FeatCal+'s in the same draws: range over sample counts."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for suite, head in SUITES.items():
        for count in (8, 64, 256):
            rows = rows_of("comparison", f"draws-{suite}-n{count}.json")
            seconds = {row["head"]: row["cost"].get("seconds") for row in rows}
            for name in SUITE_ROWS[1:-1]:
                if seconds.get(name):
                    ratio = seconds[name] / seconds["+ featcal_plus"]
                    ratios.setdefault(name, {}).setdefault(head, []).append(ratio)

    def span(values: Sequence[float]) -> str:
        ends = dict.fromkeys(f"{end:.1f}" for end in (min(values), max(values)))
        return " to ".join(ends)

    lines = [
        [name, *(span(by_suite[head]) if head in by_suite else "-" for head in SUITES.values())]
        for name, by_suite in ratios.items()
        if name != "+ featcal_plus"
    ]
    return table(["seconds / those of featcal_plus", *SUITES.values()], lines)


def costs(row: Row) -> list[str]:
    """Return a row's seconds and memory."""
    cost = row["cost"]
    if "seconds" not in cost:
        return ["-", "-"]
    return [f"{cost['seconds']:.1f}", f"{cost['peak_rss_bytes'] / 2**20:.0f}"]
