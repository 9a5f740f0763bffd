"""Write the generated parts of README.md and docs/ and their figures.

A generated part is between `<!-- generated: NAME -->` and `<!-- end of NAME -->`. PARTS has its
source: lines of runs in docs/results (written by scripts/results*.sh), settings, benchmarks, or the
paper's numbers. `--check` changes nothing and fails if a part or a figure is stale.

    python scripts/write_tables.py [--check]
"""

import argparse
import csv
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Any

from fusion_bench_featcal.lab.diagnosis.views import (
    by_block,
    diagnosis_figures,
    diagnosis_tables,
)
from fusion_bench_featcal.results import Results, frame_of, summary
from fusion_bench_featcal.results.figures import Value, curves, dots, svg, value_of
from fusion_bench_featcal.results.folders import find
from fusion_bench_featcal.results.frame import paired
from fusion_bench_featcal.results.joining import join
from fusion_bench_featcal.results.lines import read_run
from fusion_bench_featcal.results.numbers import Unit, share_text
from fusion_bench_featcal.results.run import ROWS_ERROR, ROWS_SHARE
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.statistics import difference

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(^<!-- end of (?P=name) -->)",
    re.DOTALL | re.MULTILINE,
)
SUITES = {
    "clip-vit-mini_TA6": "CLIP, images",
    "clip-vit-mini_alphabets2": "CLIP, two alphabets",
    "flan-t5-mini_TA6": "T5, texts",
    "llama-mini_TA6": "Llama, texts",
    "resnet-mini_TA3": "ResNet, images",
}
REAL = {
    "minilm_TA6": "MiniLM, real pretrained weights",
    "dinov2_small_TA4": "DINOv2, real pretrained weights",
    "smollm2_TA4": "SmolLM2, real pretrained weights",
}
README_SUITES = ("clip-vit-mini_TA6", "flan-t5-mini_TA6", "llama-mini_TA6", "minilm_TA6")
STARTS = ("clip-vit-mini_TA6", "llama-mini_TA6")
"""Suites of `scripts/results_starts.sh`."""
UNLIKE = {
    "minilm_TA6": {
        "clean": "each task's own",
        "shuffled": "words in random order",
        "exchanged": "two tasks exchanged",
        "others": "another task's, for each",
    },
    "dinov2_small_TA4": {
        "clean": "each task's own",
        "fog": "in fog, severity 3",
        "gaussian_noise": "with noise, severity 3",
        "motion_blur": "blurred, severity 3",
        "exchanged": "two tasks exchanged",
        "one": "the first task's, for all",
    },
}
"""Suites and kinds of samples, which are folders of docs/results, with their labels."""
DRAWS = {
    "8": ("featcal_few", "featcal_few_43"),
    "64": ("featcal_plus", "featcal_usual_43"),
    "256": ("featcal_many", "featcal_many_43"),
}
"""Rows of FeatCal+ by samples per task, with two draws of samples each."""
README_ROWS = {
    "merged by task arithmetic": ("task_arithmetic",),
    "+ gradient distillation": ("distillation",),
    "+ FeatCal, the paper's settings": (
        "featcal_paper_flan_t5",
        "featcal_paper_llama_3b",
        "featcal",
    ),
    "+ FeatCal+": ("featcal_plus",),
    "one expert per task": ("experts",),
}
"""Labels and rows of README's table. The first row that a suite has is taken."""
AVERAGE = "accuracy.average"
MEASURED_COSTS = ("seconds", "peak_rss_bytes", "peak_accelerator_bytes", "gpu_energy_wh")
DRAWN_ROWS = {"task_arithmetic": "merged", "featcal": "featcal", "featcal_plus": "featcal_plus",
              "experts": "experts"}  # fmt: skip
FOUR_BITS = "smollm2_TA4-four-bits"
FOUR_BITS_ROWS = {
    "task_arithmetic": "merged by task arithmetic",
    "featcal": "+ FeatCal, the paper's settings for CLIP",
    "featcal_paper_llama_3b-targets": "+ FeatCal, the paper's settings for Llama",
    "featcal_plus": "+ FeatCal+",
}
"""Models of `scripts/results_four_bits.sh`, with their labels."""
DIAGNOSIS = "diagnosis"
DIAGNOSIS_FIGURES = ("diagnosis-terms", "diagnosis-components")


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    rule = "|".join([":--", *["--:"] * (len(heads) - 1)])
    head, *rest = (f"| {' | '.join(row)} |" for row in [heads, *lines])
    return "\n".join([head, f"|{rule}|", *rest])


# ---- results of runs


@cache
def results_of(name: str) -> Results:
    """Return the joined runs of a folder of docs/results, in the order of their paths.

    Times of files differ between checkouts.
    """
    return join({folder: read_run(folder) for folder in find([RESULTS / name])})


def results_part(suite: str) -> str:
    """Return a suite's table: every row's tasks, gain, share, worst task and costs.

    Costs are left out where runs shared a GPU.
    """
    results = results_of(suite)
    for row in results.rows if suite in REAL else ():
        row.cost = {key: value for key, value in row.cost.items() if key not in MEASURED_COSTS}
    (accuracies,) = tables_of(frame_of(results))
    return f"{accuracies.markdown()}\n\n{measured(results)}"


def measured(results: Results) -> str:
    """Return a line with the machine and the versions of runs."""
    run = next(iter(results.runs.values()))
    machine = run.device.get("accelerator") or (
        f"{run.device['cpu']} ({run.device['torch_threads']} thread)"
    )
    return (
        f"- measured on {machine}, with torch {run.versions['torch']} and transformers "
        f"{run.versions['transformers']}"
    )


def averages(suite: str) -> dict[str, dict[str, Any]]:
    """Return a suite's rows of averages by name."""
    records = summary(results_of(suite)).to_dict("records")
    return {row["row"]: row for row in records}


def readme_table() -> str:
    """Average accuracies of a few rows on three suites."""
    lines = []
    for label, names in README_ROWS.items():
        records = (next(filter(None, map(averages(suite).get, names))) for suite in README_SUITES)
        lines.append([label, *(f"{100 * row[AVERAGE]:.1f}" for row in records)])
    return table(["accuracy, %", *((SUITES | REAL)[suite] for suite in README_SUITES)], lines)


def percent(record: dict[str, Any]) -> str:
    """Return a row's average, and in brackets the share of the worst task's gap it recovers."""
    share = record.get("worst_share")
    text = f"{100 * record[AVERAGE]:.1f}"
    return text if share is None or share != share else f"{text} ({100 * share:.0f} %)"


def grid(name: str, label: str) -> str:
    """Return a table with a line for each method and a column for each merger or label's value."""
    results = results_of(name)
    records = [r for r in summary(results).to_dict("records") if r["merger"]]
    columns = list(dict.fromkeys(r[label] for r in records if r[label] == r[label]))
    if label != "merger":
        columns.sort()
    cells: dict[str, dict[Any, str]] = {}
    for record in records:
        row = "merged" if record["row"] == record["merger"] else f"+ {record['row']}"
        of = [record[label]] if record[label] in columns else columns  # merged: for all of them
        cells.setdefault(row, {}).update(dict.fromkeys(of, percent(record)))
    heads = [str(column) for column in columns]
    heads[0] = f"{label.removesuffix('_per_task')}: {heads[0]}" if label != "merger" else heads[0]
    lines = [[row, *(of.get(column, "-") for column in columns)] for row, of in cells.items()]
    return f"{table(['', *heads], lines)}\n\n{measured(results)}"


def unlike_table(suite: str) -> str:
    """Return averages by kind and number of samples, both draws, and the least gain of a task."""
    lines, kinds = [], {kind: averages(f"{suite}-{kind}") for kind in UNLIKE[suite]}
    draws = {n: names for n, names in DRAWS.items() if any(names[0] in r for r in kinds.values())}
    for kind, rows in kinds.items():
        merged, paper = rows["task_arithmetic"], rows["featcal_paper"]
        plus = [[rows[name] for name in names if name in rows] for names in draws.values()]
        tasks = [key for key in merged if key.startswith("accuracy.") and key != AVERAGE]
        gains = {task: mean(row[task] for row in plus[1]) - merged[task] for task in tasks}
        worst = min(tasks, key=lambda task: gains[task])
        lines.append([UNLIKE[suite][kind],
                      *(f"{100 * row[AVERAGE]:.1f}" for row in (merged, paper)),
                      *(", ".join(f"{100 * row[AVERAGE]:.1f}" for row in of) or "-" for of in plus),
                      f"{worst.removeprefix('accuracy.')} {100 * gains[worst]:+.1f}"])  # fmt: skip
    columns = ["samples", "merged", "featcal, 64", *(f"FeatCal+, {n}" for n in draws),
               "least gain of a task at 64"]  # fmt: skip
    return f"{table(columns, lines)}\n\n{measured(results_of(f'{suite}-clean'))}"


def four_bits_table() -> str:
    """Return averages of models in 16 and 4 bits, shares of the gap, and the cost of 4 bits."""
    results = results_of(FOUR_BITS)
    of_titles = {line.first.title: line for line in frame_of(results).lines}
    merged, experts = of_titles["task_arithmetic/bits_16"].values, of_titles["experts"].values

    def share(values: Mapping[str, float], task: str) -> float:
        return (values[task] - merged[task]) / (experts[task] - merged[task])

    lines = []
    for name, label in FOUR_BITS_ROWS.items():
        pair = [of_titles[f"{name}/{row}"] for row in ("bits_16", "bits_4")]
        cells = [label, *(f"{100 * line.values['average']:.1f}" for line in pair)]
        cells.append(Unit.of("accuracy").gain(difference(*paired(*reversed(pair)))))
        for values in () if name == "task_arithmetic" else (line.values for line in pair):
            worst = min(values.keys() - {"average"}, key=lambda task: share(values, task))
            of_average, of_worst = (share_text(share(values, key)) for key in ("average", worst))
            cells += [f"{of_average} ({worst} {of_worst})"]
        lines.append(cells + ["-"] * (6 - len(cells)))
    heads = ["", "16 bits", "4 bits", "difference", "gap recovered, 16 bits (worst task)",
             "gap recovered, 4 bits (worst task)"]  # fmt: skip
    return f"{table(heads, lines)}\n\n{measured(results)}"


def rows_figure() -> str:
    """Draw what the step of the rows from weights breaks, and how far they count, by block."""
    panels: dict[str, dict[str, dict[Any, Value]]] = {}
    for suite in UNLIKE:
        (run,) = results_of(f"{suite}-clean").runs.values()
        for metric, title in ((ROWS_ERROR, "e"), (ROWS_SHARE, "f")):
            values = by_block(run, metric)["featcal_plus"].dropna().tolist()
            at = {n: Value(value, 0.0) for n, value in enumerate(values)}
            panels.setdefault(title, {})[REAL[suite].split(",")[0]] = at
    figure = curves(panels, "block", "median over modules")
    figure.axes[0].set_yscale("log")
    return svg(figure)


def accuracies_figure() -> str:
    """Draw a line for each suite, a dot for each row, with an interval if it has one."""
    rows: dict[str, dict[str, Value]] = {name: {} for name in DRAWN_ROWS.values()}
    for suite, label in (SUITES | REAL).items():
        category = label.replace("real pretrained weights", "pretrained")
        for line in frame_of(results_of(suite)).lines:
            if line.first.name in DRAWN_ROWS:
                rows[DRAWN_ROWS[line.first.name]][category] = value_of(line)
    return svg(dots({"": rows}, "average accuracy, % (bars: 95 % interval)"))


def diagnosis_part() -> str:
    """Return the tables of the diagnosis in docs/results."""
    results = results_of(DIAGNOSIS)
    (run,) = results.runs.values()
    tables = [f"*{part.title}*\n\n{part.markdown()}" for part in diagnosis_tables(run)]
    return "\n\n".join([*tables, measured(results)])


def figures() -> dict[Path, str]:
    """Return the texts of the figures of README.md and docs/."""
    (run,) = results_of(DIAGNOSIS).runs.values()
    diagnosis = diagnosis_figures(run)
    texts = {name: svg(diagnosis[name]) for name in DIAGNOSIS_FIGURES}
    texts |= {"accuracies": accuracies_figure(), "rows": rows_figure()}
    return {FIGURES / f"{name}.svg": text for name, text in texts.items()}


# ---- the paper


def paper_commands() -> str:
    """Return the commands of the paper's tables and figures, by examples/studies.sh."""
    script = [ROOT / "examples" / "studies.sh", "--list", "--paper"]
    lines = subprocess.check_output(script, text=True).splitlines()
    sections = [
        f"**{title.removeprefix('# ')}**\n\n```bash\n{command}\n```"
        for title, command in zip(lines[::2], lines[1::2], strict=True)
    ]
    return "\n\n".join(sections)


def paper_averages() -> str:
    """Return the paper's average accuracies. A question mark is a doubt noted in the file."""
    methods = {"": "merged", "surgery": "+ Surgery", "prob_surgery": "+ ProbSurgery",
               "featcal": "+ FeatCal", "experts": "experts"}  # fmt: skip
    mergers = ("simple_average", "task_arithmetic", "adamerging", "wudi")
    with (ROOT / "scripts" / "paper_results.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "average"]
    value = {}
    for row in rows:
        is_doubted = row["note"] and not row["note"].startswith("average only")
        key = row["setting"], row["upstream"], row["post_merging"]
        value[key] = f"{row['value']} ?" if is_doubted else row["value"]
    tables = {row["setting"]: row["source"] for row in rows}
    lines = [
        [suite, tables[suite], merger,
         *(value.get((suite, "" if name == "experts" else merger, name), "-") for name in methods)]
        for suite in tables
        for merger in mergers
        if (suite, merger, "") in value
    ]  # fmt: skip
    return table(["modelpool=", "printed in", "merger", *methods.values()], lines)


# ---- the package


def methods_table() -> str:
    """Return a table of the rivals."""
    from fusion_bench_featcal.lab.rivals.standalone import ALGORITHMS

    lines = []
    for option, method in sorted((o, algorithm.kind) for o, algorithm in ALGORITHMS.items()):
        kind = "merger" if hasattr(method, "merge") else "post-merging"
        summary = (method.__doc__ or "").partition("\n")[0]
        lines.append([f"`{option}`", kind, summary, method.source])
    return table(["`method=`", "Kind", "Description", "Source"], lines).replace("--:", ":--")


def options_table() -> str:
    """Return a table of the options of `featcal calibrate`."""
    from fusion_bench_featcal.folders.options import flag_of
    from fusion_bench_featcal.folders.request import Request
    from fusion_bench_featcal.settings.fields import settings_of

    lines = ["| Option | |", "|---|---|"]
    for number, field in enumerate(settings_of(Request)):
        keys = field.metadata
        words = [flag_of(field.name) if number else "", keys.get("metavar", "")]
        lines.append(f"| `{' '.join(filter(None, words))}` | {keys['help']} |")
    return "\n".join(lines)


def settings_table() -> str:
    """Return a table of the settings of `method=featcal`."""
    from fusion_bench_featcal.lab.settings_page import settings_of_method
    from fusion_bench_featcal.settings.fields import accepted_values, yaml_word

    lines = ["| Setting | Default | Values | Meaning |", "|---|---|---|---|"]
    for field in settings_of_method("featcal"):
        default = "" if field.name == "base_method" else f"`{yaml_word(field.default)}`"
        cells = f"`{field.name}`", default, accepted_values(field), field.metadata["help"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def model_types() -> str:
    """Return the tested model types by kind and family, and the largest distance."""
    text = (ROOT / "benchmarks" / "results" / "model_types.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if "| same" in line]
    types: dict[tuple[str, str], list[str]] = {}
    for name, kind, family, *_ in rows:
        types.setdefault((kind, family), []).append(f"`{name.partition(',')[0]}`")
    lines = [[*key, ", ".join(dict.fromkeys(names))] for key, names in types.items()]
    largest = max((row[4] for row in rows), key=float)
    grouped = table(["Kind", "Family", "Model types"], lines).replace("--:", ":--")
    versions = text.strip().rpartition("\n\n")[2].partition(". ")[0]
    distance = f"Largest distance of a parameter, relative to its norm: {largest}."
    return f"{grouped}\n\n{distance} {versions}."


PARTS: dict[str, Callable[[], str]] = {
    **{f"results-{suite}": partial(results_part, suite) for suite in (*SUITES, *REAL)},
    **{f"mergers-{suite}": partial(grid, f"{suite}-mergers", "merger") for suite in REAL},
    **{f"starts-{suite}": partial(grid, f"{suite}-starts", "merger") for suite in STARTS},
    **{
        f"samples-{suite}": partial(grid, f"{suite}-samples", "samples_per_task")
        for suite in ("minilm_TA6", "dinov2_small_TA4")
    },
    **{f"unlike-{suite}": partial(unlike_table, suite) for suite in UNLIKE},
    "four-bits": four_bits_table,
    "readme-accuracy": readme_table,
    "diagnosis": diagnosis_part,
    "paper-commands": paper_commands,
    "paper-averages": paper_averages,
    "model-types": model_types,
    "methods": methods_table,
    "calibrate-options": options_table,
    "settings": settings_table,
}


def rewritten(page: Path) -> str:
    """Return a page's text with every generated part written again."""

    def fill(match: re.Match[str]) -> str:
        return f"{match[1]}{PARTS[match['name']]()}\n{match[3]}"

    return PART.sub(fill, page.read_text(encoding="utf-8"))


def main() -> None:
    """Write all pages, or with --check compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    written = {page: rewritten(page) for page in PAGES} | figures()
    stale = [
        path
        for path, text in written.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        print(f"{'stale' if options.check else 'written'}: {path.relative_to(ROOT)}")
        if not options.check:
            path.write_text(written[path], encoding="utf-8")
    if stale and options.check:
        sys.exit("run: python scripts/write_tables.py")


if __name__ == "__main__":
    main()
