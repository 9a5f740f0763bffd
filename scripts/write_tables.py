"""Write the generated parts of README.md and docs/ from docs/results, settings and benchmarks.

A generated part is between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. PARTS has its
source. `--check` changes nothing and fails if a part is stale. `--take` first copies new results
into docs/results from the folder of demo-full, compare-full, diagnose or studies.

    python scripts/write_tables.py [--check] [--take outputs/compare-full]
"""

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import paper
import reproduce
from paper import RESULTS, ROOT, read, table

from fusion_bench_featcal.results.intervals import Interval, interval_of_mean
from fusion_bench_featcal.results.long_table import LINES_FILE, read_lines
from fusion_bench_featcal.results.notes import DIAGNOSIS

Row = dict[str, Any]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(^<!-- end of (?P=name) -->)",
    re.DOTALL | re.MULTILINE,
)
SUITES = {
    "clip-vit-mini_TA6": "six image tasks",
    "clip-vit-mini_alphabets2": "two alphabets",
    "flan-t5-mini_TA6": "T5, six text tasks",
    "llama-mini_TA6": "Llama, six text tasks",
}
SUITE_ROWS = (
    "merged", "+ surgery:calibration", "+ prob_surgery:calibration", "+ surgery_v2:calibration",
    "+ distillation", "+ featcal", "+ featcal:plus", "experts",
)  # fmt: skip
README_ROWS = {
    "merged": "merged by task arithmetic",
    "+ distillation": "+ gradient distillation",
    "+ featcal": "+ FeatCal, settings of the paper",
    "+ featcal:plus": "+ FeatCal+",
    "experts": "one expert per task",
}
README_COLUMNS = {
    "CLIP, images": "clip-vit-mini_TA6",
    "T5, texts": "flan-t5-mini_TA6",
    "Llama, texts": "llama-mini_TA6",
}
RUNS = ("TA6", "alphabets2", "resnet-mini", "flan-t5-mini", "llama-mini")
MERGER = "task_arithmetic"
DIAGNOSES = RESULTS / "diagnosis"
REFERENCES = ("base", "experts")


# ---- rows and cells


def rows_of(*path: str) -> list[Row]:
    """Return the rows of a file of results."""
    return [prepared(row) for row in read(*path)["rows"]]


def prepared(row: Row) -> Row:
    """Add a row's label in tables, and half of the interval of its average."""
    half = row.get("half_width") or None  # studies store it
    if row.get("deviation"):
        average, deviation = row["accuracy"]["average"], row["deviation"]["average"]
        half = interval_of_mean(average, deviation, row["runs"]).half
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
    """Return the share of its gap that the worst task recovers; nothing for mergers."""
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
    interval = Interval(*(limits[key] for key in ("estimate", "low", "high")))
    return f"{100 * interval.estimate:+z.1f} {interval.limits()}"


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


def accuracies(corner: str, columns: Mapping[str, Sequence[Row]], *shown: str) -> str:
    """Return a table of averages with a column for each comparison or merger, the best bold."""
    cells: dict[str, dict[str, str]] = {}
    task_id = {}
    for column, rows in columns.items():
        values = [row["accuracy"]["average"] for row in rows if row["name"] != "experts"]
        for row in rows:
            head = "merged" if row["head"] == column or row["head"] == MERGER else row["head"]
            cells.setdefault(head, {})[column] = average(row, paper.percent(max(values)))
            task_id[head] = row["cost"].get("task_id_at_inference", "yes")
    names = shown or sorted(cells, key=lambda head: head == "experts")
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


def draws(columns: Mapping[str, str], *shown: str) -> str:
    """Return a table of comparisons over task arithmetic with three draws."""
    rows = {
        head: [row for row in rows_of("comparison", f"{name}.json") if row["name"] != "base"]
        for head, name in columns.items()
    }
    return accuracies("mean over draws, % (worst gap)", rows, *shown)


def suites_table() -> str:
    """A few rows on every suite with 64 samples."""
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


def columns_table() -> str:
    """Meanings of the columns of reports, as their legends have them."""
    from fusion_bench_featcal.lab.report.columns import ACCURACY, COSTS

    meanings = [column.meaning.partition(": ")[::2] for column in (*ACCURACY, *COSTS)]
    lines = [[head, meaning] for head, meaning in meanings if meaning]
    return table(["column", "meaning"], lines).replace("--:", ":--")


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
                    ratio = seconds[name] / seconds["+ featcal:plus"]
                    ratios.setdefault(name, {}).setdefault(head, []).append(ratio)

    def span(values: Sequence[float]) -> str:
        ends = dict.fromkeys(f"{end:.1f}" for end in (min(values), max(values)))
        return " to ".join(ends)

    lines = [
        [name, *(span(by_suite[head]) if head in by_suite else "-" for head in SUITES.values())]
        for name, by_suite in ratios.items()
        if name != "+ featcal:plus"
    ]
    return table(["seconds / those of featcal:plus", *SUITES.values()], lines)


def costs(row: Row) -> list[str]:
    """Return a row's seconds and memory."""
    cost = row["cost"]
    if "seconds" not in cost:
        return ["-", "-"]
    return [f"{cost['seconds']:.1f}", f"{cost['peak_rss_bytes'] / 2**20:.0f}"]


# ---- studies and diagnoses


def study_table(suite: str, name: str) -> str:
    """Return a study's accuracies, or the differences of a study of one point."""
    content = read("studies", suite, f"{name}.json")
    points = study_points(content)
    seeds = f", seeds {', '.join(map(str, content['seeds']))}"
    if len(points) == 1:
        lines = [
            [row["head"], average(row | {"worst_recovered_gap": None}),
             gain(row, "difference"), "-" if row["is_merger"] else row["against"], worst(row)]
            for row in points[0][1].values()
        ]  # fmt: skip
        heads = ["", "average, %", "difference", "from", "worst task, its gap"]
        return f"{table(heads, lines)}\n\n{measured(content)}{seeds}"
    names = list(dict.fromkeys(head for _, rows in points for head in rows))
    names.sort(key=lambda head: head == "experts")
    columns = [[average(rows[head]) if head in rows else "-" for head in names]
               for _, rows in points]  # fmt: skip
    if name == "cost":
        for column, (_, rows) in zip(columns, points, strict=True):
            for index, head in enumerate(names):
                if "seconds" in rows[head]["cost"]:
                    column[index] += ", {} s, {} MiB".format(*costs(rows[head]))
    lines = [[head, *column] for (head, _), column in zip(points, columns, strict=True)]
    cells = [["average, % (worst gap)", *names], *lines]
    if len(points) <= 8:
        cells = [list(line) for line in zip(*cells, strict=True)]
    return f"{table(cells[0], cells[1:])}\n\n{measured(content)}{seeds}"


def study_points(content: Mapping[str, Any]) -> list[tuple[str, dict[str, Row]]]:
    """Return points by labels and rows by heads.

    Of a plane of two settings, points off the two axes through the first point are left out. Rows
    are means over the labels that the study averages over, with the worst task of all.
    """
    first = content["points"][0]["labels"]
    points: dict[str, dict[str, list[Row]]] = {}
    for point in content["points"]:
        labels = {k: v for k, v in point["labels"].items() if k not in content["over"]}
        if content["name"] == "sweep" and sum(first[k] != v for k, v in labels.items()) > 1:
            continue
        text = ", ".join(f"{k} = {v}" for k, v in labels.items()).replace("samples_per_task", "n")
        rows = points.setdefault(text, {})
        for row in (prepared(row) for row in point["rows"] if row["name"] != "base"):
            rows.setdefault(row["head"], []).append(row)
    return [(text, {head: _mean(each) for head, each in rows.items()})
            for text, rows in points.items()]  # fmt: skip


def _mean(rows: Sequence[Row]) -> Row:
    least = min(rows, key=lambda row: row["worst_recovered_gap"] or 0.0)
    mean = fmean(row["accuracy"]["average"] for row in rows)
    return least | {"accuracy": {"average": mean}} if len(rows) > 1 else least


def diagnosis_part(suite: str) -> str:
    """Return the tables and sentences of a diagnosis."""
    from fusion_bench_featcal.lab.report.diagnosis import diagnosis_grids, diagnosis_sentences

    lines, run = read_lines(DIAGNOSES / suite / LINES_FILE), read("diagnosis", suite, "run.json")
    grids = diagnosis_grids(lines).items()
    tables = [f"*{title}*\n\n{grid.for_page().markdown()}" for title, grid in grids]
    notes = [note["text"] for note in run["notes"] if note["kind"] == DIAGNOSIS]
    texts = (*diagnosis_sentences(lines), *notes)
    sentences = [
        f"- {re.sub('; .', lambda end: f'. {end[0][2:].upper()}', text)}" for text in texts
    ]
    return "\n\n".join([*tables, "\n".join([*sentences, measured(run)])])


def _new_sentence(separator: re.Match[str]) -> str:
    return f". {separator[0][-1].upper()}"


# ---- settings and benchmarks


def methods_table() -> str:
    """Every registered method."""
    from fusion_bench_featcal.lab.rivals.registry import all_methods

    lines = []
    for option, method in all_methods().items():
        kind = "merger" if hasattr(method, "merge") else "post-merging"
        summary = (method.__doc__ or "").partition("\n")[0]
        lines.append([f"`{option}`", kind, summary, method.source])
    return table(["`method=`", "Kind", "Description", "Source"], lines).replace("--:", ":--")


def options_table() -> str:
    """Every option of `featcal calibrate`."""
    from fusion_bench_featcal.folders.options import flag_of
    from fusion_bench_featcal.folders.request import Request
    from fusion_bench_featcal.setting_fields import settings_of

    lines = ["| Option | |", "|---|---|"]
    for number, field in enumerate(settings_of(Request)):
        keys = field.metadata
        words = [flag_of(field.name) if number else "", keys.get("metavar", "")]
        lines.append(f"| `{' '.join(filter(None, words))}` | {keys['help']} |")
    return "\n".join(lines)


def text_of(path: str, *, after: str = "") -> str:
    """Return the text of a file of the repository, or the part of it after a heading."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text[text.index(after) + len(after) :].strip()


STUDIES = {
    "clip-vit-mini_TA6": (
        "samples", "ablation", "sweep", "cost", "corruption", "severity", "transfer"
    ),
    "clip-vit-mini_all8": ("tasks",),
    "flan-t5-mini_TA6": ("samples", "ablation"),
    "llama-mini_TA6": ("samples", "ablation"),
}  # fmt: skip
PARTS: dict[str, Callable[[], str]] = {
    **{f"results-{name}": partial(run_table, name) for name in RUNS},
    "readme-accuracy": readme_table,
    "report-columns": columns_table,
    "comparison-suites": suites_table,
    "comparison-grid": partial(grid, "grid"),
    "comparison-texts": partial(grid, "flan-t5-mini", "llama-mini"),
    "comparison-field": partial(grid, "field"),
    "comparison-kl": partial(grid, "kl"),
    "comparison-costs": costs_table,
    "comparison-times": times_table,
    "comparison-tasks": grid_tasks,
    **{
        f"draws-{suite}": partial(draws, {f"n = {n}": f"draws-{suite}-n{n}" for n in (8, 64, 256)})
        for suite in SUITES
    },
    **{
        f"study-{name}-{suite}": partial(study_table, suite, name)
        for suite, names in STUDIES.items()
        for name in names
    },
    **{
        f"diagnosis{end}": partial(diagnosis_part, suite)
        for suite, end in zip(paper.OURS, ("", "-t5", "-llama"), strict=True)
    },
    "paper-commands": reproduce.commands_part,
    "paper-averages": paper.averages_table,
    "paper-samples": paper.samples_table,
    "paper-corrupted": paper.corruption_table,
    "paper-cost": paper.cost_table,
    "paper-observations": paper.observations_part,
    "paper-drift": paper.drift_table,
    "model-types": partial(text_of, "benchmarks/results/model_types.md"),
    "scale-predicted": partial(text_of, "benchmarks/results/scale.md", after="## Predicted\n"),
    "methods": methods_table,
    "calibrate-options": options_table,
    "method-yaml": lambda: f"```yaml\n{text_of('config/method/featcal.yaml')}\n```",
}


def take(folder: Path) -> None:
    """Copy the results in the folder of a make target into docs/results."""
    from fusion_bench_featcal.lab.report.diagnosis import diagnosis_of

    for source in sorted((folder / "tables").glob("*/report.json")):
        name, content = source.parent.name, json.loads(source.read_text(encoding="utf-8"))
        for run in sorted((folder / name).glob("task_arithmetic*/report.json"))[:1]:
            report = json.loads(run.read_text(encoding="utf-8"))
            content |= {"device": report["device"], "versions": report["versions"]}
        for row in content["rows"]:
            row.setdefault("runs", len(row["seeds"]))
        kind = "runs" if name in RUNS else "comparison"
        _keep(content, kind, f"{name}.json")
    for source in sorted(folder.glob("*/*/report.json")):
        content = json.loads(source.read_text(encoding="utf-8"))
        if content.get("kind") == "study":
            suite, name = source.parts[-3:-1]
            _keep(content, "studies", suite, f"{name}.json")
            _draw(source.parent, f"{suite}-{name}")
    for source in sorted(folder.glob(f"*/{LINES_FILE}")):
        suite = source.parent.name
        if not diagnosis_of(source.parent):
            continue
        run = json.loads((source.parent / "report.json").read_text(encoding="utf-8"))
        _keep(run, "diagnosis", suite, "run.json")
        shutil.copyfile(source, RESULTS / "diagnosis" / suite / LINES_FILE)


def _draw(study: Path, name: str) -> None:
    """Draw a study's curves again if a page has them."""
    from fusion_bench_featcal.lab.report import charts
    from fusion_bench_featcal.lab.report.study import Study

    folder = ROOT / "docs" / "figures" / "studies"
    if (folder / f"{name}.svg").is_file():
        (figure,) = Study.load(study).figures().values()
        charts.save({name: figure}, folder, "--take")


def _keep(content: Mapping[str, Any], *path: str) -> None:
    """Write a JSON file with a line for each key, and for each row or point."""
    dump, lines = partial(json.dumps, ensure_ascii=False), []
    for key, value in content.items():
        text = dump(value)
        if key in ("rows", "points") and isinstance(value, list):
            text = "[\n" + ",\n".join(map(dump, value)) + "\n]"
        lines.append(f"{dump(key)}: {text}")
    file = RESULTS.joinpath(*path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def rewritten(page: Path) -> str:
    """Return a page's text with every generated part written again."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{PARTS[match['name']]()}\n{match[3]}"

    return PART.sub(fill, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write all pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--take", type=Path, nargs="*", default=(), help="folders of results")
    options = parser.parse_args()
    for folder in options.take:
        take(folder)
    stale = [page for page in PAGES if rewritten(page) != page.read_text(encoding="utf-8")]
    for page in stale:
        print(f"{'stale' if options.check else 'written'}: {page.relative_to(ROOT)}")
        if not options.check:
            page.write_text(rewritten(page), encoding="utf-8")
    if stale and options.check:
        sys.exit("run: python scripts/write_tables.py")


if __name__ == "__main__":
    main()
