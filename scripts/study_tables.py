"""Tables of studies and diagnoses, from docs/results."""

import re
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from comparison_tables import Row, average, costs, gain, measured, prepared, worst
from paper import RESULTS, read, table

from fusion_bench_featcal.lab.diagnosis.views import diagnosis_sentences, diagnosis_tables
from fusion_bench_featcal.results import Run
from fusion_bench_featcal.results.lines import read_lines
from fusion_bench_featcal.results.notes import DIAGNOSIS

DIAGNOSES = RESULTS / "diagnosis"


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
    return [(text, {head: _mean(values) for head, values in rows.items()})
            for text, rows in points.items()]  # fmt: skip


def _mean(rows: Sequence[Row]) -> Row:
    least = min(rows, key=lambda row: row["worst_recovered_gap"] or 0.0)
    mean = fmean(row["accuracy"]["average"] for row in rows)
    return least | {"accuracy": {"average": mean}} if len(rows) > 1 else least


def diagnosis_part(suite: str) -> str:
    """Return the tables and sentences of a diagnosis."""
    run = read("diagnosis", suite, "run.json")
    diagnosed = Run(merger=run["upstream"], lines=read_lines(DIAGNOSES / suite / "lines.csv"))
    tables = [f"*{table.title}*\n\n{table.markdown()}" for table in diagnosis_tables(diagnosed)]
    notes = [note["text"] for note in run["notes"] if note["kind"] == DIAGNOSIS]
    texts = (*diagnosis_sentences(diagnosed), *notes)
    sentences = [
        f"- {re.sub('; .', lambda end: f'. {end[0][2:].upper()}', text)}" for text in texts
    ]
    return "\n\n".join([*tables, "\n".join([*sentences, measured(run)])])
