"""Tables of the runs in docs/results."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import mean
from typing import Any

from result_figures import DIAGNOSIS
from result_records import (
    AVERAGE,
    PAPER_ROWS,
    REAL,
    RESULTS,
    SUITES,
    UNLIKE,
    average_and_missed,
    averages,
    by_suite,
    percent,
    results_of,
    short_label,
    suites_with,
    table,
    tasks_of,
    usual_machine,
    with_machine,
)

from fusion_bench_featcal.lab.diagnosis.views import diagnosis_tables
from fusion_bench_featcal.results import Results, frame_of, summary
from fusion_bench_featcal.results.against import against
from fusion_bench_featcal.results.frame import paired
from fusion_bench_featcal.results.joining import join
from fusion_bench_featcal.results.names import FEATCAL, FEATCAL_PLUS
from fusion_bench_featcal.results.show import tables_of
from fusion_bench_featcal.results.statistics import LEVEL, difference
from fusion_bench_featcal.results.tables import Unit, share_text

ONE_MERGER = ("mpnet_TA6", "whisper_TA4")
"""Suites of real weights that were run on task arithmetic alone."""
README_SUITES = ("clip-vit-mini_TA6", "flan-t5-mini_TA6", "llama-mini_TA6", "minilm_TA6")
STARTS = ("clip-vit-mini_TA6", "llama-mini_TA6")
"""Suites of `scripts/results_starts.sh`."""
MIXTURE = "qwen3moe-mini_TA6"
RIVALS = {
    ("task_arithmetic", "task_arithmetic"): "task arithmetic",
    ("task_arithmetic", "featcal_plus"): "task arithmetic, FeatCal+",
    ("task_arithmetic", "react"): "task arithmetic, ReACT",
    ("swudi", "swudi"): "ASWUDI",
    ("swudi_published", "swudi_published"): "SWUDI, its authors' settings",
    ("swudi", "featcal"): "ASWUDI, featcal",
    ("swudi", "featcal_plus"): "ASWUDI, FeatCal+",
    ("swudi", "react"): "ASWUDI, ReACT",
    ("larv", "larv"): "LARV over Iso-C",
    ("larv", "featcal_plus"): "LARV over Iso-C, FeatCal+",
    ("task_arithmetic", "react_task_id"): "*task arithmetic, ReACT*",
    ("task_arithmetic", "ridge_surgery"): "*task arithmetic, ridge surgery*",
    ("swudi", "react_task_id"): "*ASWUDI, ReACT*",
    ("swudi", "ridge_surgery"): "*ASWUDI, ridge surgery*",
}
"""Mergers and rows of `scripts/results_rivals.sh`, with their labels."""
DISTILLED = {
    ("task_arithmetic", "task_arithmetic"): "task arithmetic",
    ("task_arithmetic", "seqkd"): "task arithmetic, seqkd",
    ("task_arithmetic", "mopd"): "task arithmetic, mopd",
    ("featcal_plus", "featcal_plus"): "FeatCal+",
    ("featcal_plus", "seqkd"): "FeatCal+, seqkd",
    ("featcal_plus", "mopd"): "FeatCal+, mopd",
}
"""Mergers and rows of `scripts/results_distilled.sh`, with their labels."""
REFERENCE = f"task_arithmetic/{FEATCAL_PLUS}"
"""Row that the others are compared with."""
FEW = ("clip-vit-mini_TA6", "flan-t5-mini_TA6", "llama-mini_TA6", MIXTURE)
"""Suites of `scripts/results_few.sh`."""
DRAWS = {
    "8": ("featcal_few", "featcal_few_43"),
    "64": ("featcal_plus", "featcal_usual_43"),
    "256": ("featcal_many", "featcal_many_43"),
}
"""Rows of FeatCal+ by samples per task, with two draws of samples each."""
README_ROWS = {
    "merged by task arithmetic": ("task_arithmetic",),
    "+ gradient distillation": ("distillation",),
    "+ FeatCal, the paper's settings": PAPER_ROWS,
    "+ FeatCal+": ("featcal_plus",),
    "one expert per task": ("experts",),
}
"""Labels and rows of README's table. The first row that a suite has is taken."""
RIVAL_NAMES = {
    "task_arithmetic/distillation": "distillation",
    "swudi": "ASWUDI",
    "swudi_published": "SWUDI",
    "swudi/react": "ASWUDI + ReACT",
    "regmean_plusplus": "RegMean++",
    "lot": "LOT",
}
"""Methods of the overview by their titles, with their labels."""
NUMBER = "samples_per_task"
MEASURED_COSTS = ("seconds", "peak_rss_bytes", "peak_accelerator_bytes", "gpu_energy_wh")
FOUR_BITS = "smollm2_TA4-four-bits"
FOUR_BITS_ROWS = {
    "task_arithmetic": "merged by task arithmetic",
    "featcal": "+ FeatCal, the paper's settings for CLIP",
    "featcal_paper_llama_3b-targets": "+ FeatCal, the paper's settings for Llama",
    "featcal_plus": "+ FeatCal+",
}
"""Models of `scripts/results_four_bits.sh`, with their labels."""
BALANCED = {
    ("task_arithmetic", "featcal_plus"): "FeatCal+",
    ("task_arithmetic", "featcal_plus_half"): "`balance=0.5`",
    ("task_arithmetic", "featcal_plus_balance"): "`balance=1`",
    ("featcal_plus", "polish"): "FeatCal+, polish",
    ("balanced", "polish"): "`balance=1`, polish",
    ("featcal_plus", "ridge_surgery"): "FeatCal+, ridge surgery",
    ("balanced", "ridge_surgery"): "`balance=1`, ridge surgery",
}
"""Mergers and rows of `scripts/results_balance.sh`, with their labels."""


def results_part(suite: str) -> str:
    """Return a suite's tables: every row's gain, gap closed, worst task and costs, and its tasks.

    Costs are left out where runs shared a GPU.
    """
    results = results_of(suite)
    if suite in REAL:
        rows = [
            replace(row, cost={k: v for k, v in row.cost.items() if k not in MEASURED_COSTS})
            for row in results.rows
        ]
        results = replace(results, rows=rows)
    frame = frame_of(results)
    (whole,) = tables_of(frame)
    summary, tasks = whole.split_tasks(len(frame.tasks))
    return with_machine(f"{summary.markdown()}\n\n{tasks.markdown()}", results)


def readme_table() -> str:
    """Average accuracies of a few rows on some suites, and the worst task's share of its gap."""
    lines = []
    for label, names in README_ROWS.items():
        records = (next(filter(None, map(averages(suite).get, names))) for suite in README_SUITES)
        lines.append([label, *map(percent, records)])
    return table(["accuracy, %", *((SUITES | REAL)[suite] for suite in README_SUITES)], lines)


def best_rival(suite: str) -> str:
    """Return the best average of another method that yields one model for all tasks, and its name.

    Methods after FeatCal or FeatCal+ are no rivals of them.
    """
    names = [f"{suite}{kind}" for kind in ("", "-rivals", "-distilled")]
    lines = [
        line
        for name in names
        if (RESULTS / name).exists()
        for line in frame_of(results_of(name)).lines
        if line.first.merger and not line.needs_task_id
    ]
    averages_by_name = {
        RIVAL_NAMES.get(line.first.title, line.first.name): line.values["average"]
        for line in lines
        if line.first.title != "task_arithmetic" and FEATCAL not in line.first.title
    }
    best = max(averages_by_name, key=averages_by_name.__getitem__)
    return f"{100 * averages_by_name[best]:.1f} ({best})"


def overview() -> str:
    """Return a line for each suite: the merged model, both rules, the best rival, the experts."""
    lines = []
    for suite in SUITES | REAL:
        rows = averages(suite)
        paper = next(filter(None, map(rows.get, PAPER_ROWS)))
        plus = rows[FEATCAL_PLUS]
        models = (rows["task_arithmetic"], paper, plus, rows["experts"])
        texts = [f"{100 * row[AVERAGE]:.1f}" for row in models]
        shares = f"{share_text(plus['share'])} ({share_text(plus['worst_share'])})"
        texts[2:3] = [f"**{texts[2]}**", best_rival(suite)]
        lines.append([short_label(suite), *texts, shares])
    heads = ["", "merged", "FeatCal", "FeatCal+", "best other method", "experts",
             "gap closed (worst task)"]  # fmt: skip
    return table(heads, lines)


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
        filled = [record[label]] if record[label] in columns else columns  # merged: for all of them
        cells.setdefault(row, {}).update(dict.fromkeys(filled, percent(record)))
    heads = [str(column) for column in columns]
    heads[0] = f"{label.removesuffix('_per_task')}: {heads[0]}" if label != "merger" else heads[0]
    lines = [[row, *(texts.get(column, "-") for column in columns)] for row, texts in cells.items()]
    return with_machine(table(["", *heads], lines), results)


def few_table() -> str:
    """Return FeatCal+'s averages by merger and samples, and the runs that harm a task."""
    harms: dict[str, dict[int, list[bool]]] = {FEATCAL: {}, FEATCAL_PLUS: {}}
    cells: dict[tuple[str, str], dict[Any, str]] = {}
    for suite in FEW:
        results = results_of(f"{suite}-few")
        for folder, run in results.runs.items():
            for line in frame_of(join({folder: run})).lines:
                if line.first.name in harms:
                    number_harms = harms[line.first.name].setdefault(
                        line.first.settings[NUMBER], []
                    )
                    number_harms.append(min(line.gains.values()) < 0)
        for record in summary(results).to_dict("records"):
            if record["row"] in (record["merger"], FEATCAL_PLUS):
                column = "merged" if record["row"] == record["merger"] else record[NUMBER]
                key = SUITES[suite].split(",")[0], record["merger"]
                cells.setdefault(key, {})[column] = percent(record)
    numbers = sorted(harms[FEATCAL_PLUS])
    lines = [[*key, *(texts[n] for n in ("merged", *numbers))] for key, texts in cells.items()]
    for name, rule_harms in harms.items():
        counts = (f"{sum(rule_harms[n])} of {len(rule_harms[n])}" for n in numbers)
        lines.append(["all", f"runs of {name} with a task below merged", "", *counts])
    heads = ["", "merger", "merged", f"samples: {numbers[0]}", *map(str, numbers[1:])]
    return with_machine(table(heads, lines), results_of(f"{FEW[0]}-few"))


def unlike_table(suite: str) -> str:
    """Return averages by kind and number of samples, both draws, and the least gain of a task."""
    lines, kinds = [], {kind: averages(f"{suite}-{kind}") for kind in UNLIKE[suite]}
    draws = {n: names for n, names in DRAWS.items() if any(names[0] in r for r in kinds.values())}
    for kind, rows in kinds.items():
        merged, paper = rows["task_arithmetic"], rows["featcal_paper"]
        plus = [[rows[name] for name in names if name in rows] for names in draws.values()]
        gains = {key: mean(row[key] for row in plus[1]) - merged[key] for key in tasks_of(merged)}
        worst = min(gains, key=lambda task: gains[task])
        lines.append([UNLIKE[suite][kind],
                      *(f"{100 * row[AVERAGE]:.1f}" for row in (merged, paper)),
                      *(", ".join(f"{100 * row[AVERAGE]:.1f}" for row in draw) or "-"
                        for draw in plus),
                      f"{worst.removeprefix('accuracy.')} {100 * gains[worst]:+.1f}"])  # fmt: skip
    columns = ["samples", "merged", "featcal, 64", *(f"FeatCal+, {n}" for n in draws),
               "least gain of a task at 64"]  # fmt: skip
    return with_machine(table(columns, lines), results_of(f"{suite}-clean"))


def four_bits_table() -> str:
    """Return averages of models in 16 and 4 bits, shares of the gap, and the cost of 4 bits."""
    results = results_of(FOUR_BITS)
    lines_by_title = {line.first.title: line for line in frame_of(results).lines}
    merged, experts = (
        lines_by_title["task_arithmetic/bits_16"].values,
        lines_by_title["experts"].values,
    )

    def share(values: Mapping[str, float], task: str) -> float:
        return (values[task] - merged[task]) / (experts[task] - merged[task])

    lines = []
    for name, label in FOUR_BITS_ROWS.items():
        pair = [lines_by_title[f"{name}/{row}"] for row in ("bits_16", "bits_4")]
        cells = [label, *(f"{100 * line.values['average']:.1f}" for line in pair)]
        cells.append(Unit.of("accuracy").gain(difference(*paired(*reversed(pair)))))
        for values in () if name == "task_arithmetic" else (line.values for line in pair):
            worst = min(values.keys() - {"average"}, key=lambda task: share(values, task))
            average_share, worst_share = (
                share_text(share(values, key)) for key in ("average", worst)
            )
            cells += [f"{average_share} ({worst} {worst_share})"]
        lines.append(cells + ["-"] * (6 - len(cells)))
    heads = ["", "16 bits", "4 bits", "difference", "gap recovered, 16 bits (worst task)",
             "gap recovered, 4 bits (worst task)"]  # fmt: skip
    return with_machine(table(heads, lines), results)


def balance_table() -> str:
    """Return averages by suite, and in brackets the most points that a task misses its expert by.

    A second table has the seconds, with those of the row before.
    """
    suites = suites_with("balance")
    cells, seconds = dict[tuple[str, ...], str](), dict[tuple[str, ...], str]()
    for suite in suites:
        names = [f"{suite}-{part}" for part in ("balance", "polish")]
        found = [name for name in names if (RESULTS / name).exists()]
        all_records = [
            record for n in found for record in summary(results_of(n)).to_dict("records")
        ]
        for record in all_records:
            key = suite, record["merger"], record["row"]
            cells[key] = average_and_missed(record, all_records)
            cost = record["cost.seconds"]
            if record["merger"] != "task_arithmetic":
                cost = record["cost.seconds_with_merger"]
            seconds[key] = f"{cost:.0f}" if cost == cost else "-"
    tables = [by_suite(suites, BALANCED, entries) for entries in (cells, seconds)]
    return f"{tables[0]}\n\nSeconds, with those of all steps:\n\n{tables[1]}"


def differing(results: Results) -> dict[str, str]:
    """Return row -> above or below, of one draw's rows that differ from FeatCal+ by Holm's test."""
    records = against(results, REFERENCE).to_dict("records")
    return {
        record["row"]: "above" if record["difference"] > 0 else "below"
        for record in records
        if record["adjusted"] < 1 - LEVEL
    }


def comparison_table(kind: str, labels: Mapping[tuple[str, str], str]) -> str:
    """Return averages by suite, what misses most, and what differs from FeatCal+; and seconds.

    A cell has the word above or below if its average differs from that of FeatCal+ after task
    arithmetic in each draw that has it, with Holm's correction over all differences of the draw.
    """
    suites = suites_with(kind)
    cells, seconds = dict[tuple[str, ...], str](), dict[tuple[str, ...], str]()
    for suite in suites:
        results = results_of(f"{suite}-{kind}")
        words = [
            differing(join({folder: run}))
            for folder, run in results.runs.items()
            if any(row.title == REFERENCE for row in run.rows)
        ]
        all_records = summary(results).to_dict("records")
        for record in (record for record in all_records if record["merger"]):
            key = record["merger"], record["row"]
            draws = [row for row in results.rows if (row.merger, row.name) == key]
            agreed = {draw_words.get(draws[0].title) for draw_words in words}
            word = agreed.pop() if len(agreed) == 1 else None
            cells[suite, *key] = f"{average_and_missed(record, all_records)} {word or ''}".rstrip()
            seconds[suite, *key] = f"{min(row.cost['seconds'] for row in draws):.1f}"
    tables = [by_suite(suites, labels, entries) for entries in (cells, seconds)]
    text = f"{tables[0]}\n\nSeconds of each step alone, with the faster seed:\n\n{tables[1]}"
    return with_machine(text, results_of(f"{suites[0]}-{kind}"))


def diagnosis_part() -> str:
    """Return the tables of the diagnosis in docs/results."""
    results = results_of(DIAGNOSIS)
    (run,) = results.runs.values()
    tables = [f"*{part.title}*\n\n{part.markdown()}" for part in diagnosis_tables(run)]
    return with_machine("\n\n".join(tables), results)


RESULT_PARTS: dict[str, Callable[[], str]] = {
    **{f"results-{suite}": partial(results_part, suite) for suite in (*SUITES, *REAL)},
    **{
        f"mergers-{suite}": partial(grid, f"{suite}-mergers", "merger")
        for suite in REAL
        if suite not in ONE_MERGER
    },
    **{f"starts-{suite}": partial(grid, f"{suite}-starts", "merger") for suite in STARTS},
    **{
        f"samples-{suite}": partial(grid, f"{suite}-samples", NUMBER)
        for suite in ("minilm_TA6", "mpnet_TA6", "dinov2_small_TA4")
    },
    **{f"unlike-{suite}": partial(unlike_table, suite) for suite in UNLIKE},
    "routed-experts": partial(grid, f"{MIXTURE}-slots", NUMBER),
    "routers": partial(grid, f"{MIXTURE}-routers", "merger"),
    "few": few_table,
    "machine": usual_machine,
    "balance": balance_table,
    "rivals": partial(comparison_table, "rivals", RIVALS),
    "distilled": partial(comparison_table, "distilled", DISTILLED),
    "four-bits": four_bits_table,
    "overview": overview,
    "readme-accuracy": readme_table,
    "diagnosis": diagnosis_part,
}
"""Generated parts of the pages by name."""
