"""Runs in docs/results, which scripts/results*.sh write, as records and texts of cells."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from fusion_bench_featcal.results import Results, summary
from fusion_bench_featcal.results.joining import join
from fusion_bench_featcal.results.lines import find_runs, read_run

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
SUITES = {
    "clip-vit-mini_TA6": "CLIP, images",
    "clip-vit-mini_alphabets2": "CLIP, two alphabets",
    "flan-t5-mini_TA6": "T5, texts",
    "llama-mini_TA6": "Llama, texts",
    "qwen3moe-mini_TA6": "Qwen3-MoE, texts",
    "resnet-mini_TA3": "ResNet, images",
}
REAL = {
    "minilm_TA6": "MiniLM, real pretrained weights",
    "mpnet_TA6": "MPNet, real pretrained weights",
    "dinov2_small_TA4": "DINOv2, real pretrained weights",
    "smollm2_TA4": "SmolLM2, real pretrained weights",
    "whisper_TA4": "Whisper, real pretrained weights",
}
EIGHT = "clip-vit-mini_all8"
SHORT = {EIGHT: "CLIP with eight tasks", "clip-vit-mini_alphabets2": "CLIP with two alphabets"}
"""Labels of suites whose first words are also those of another."""
USUAL = "clip-vit-mini_TA6"
"""The suite whose runs name the usual machine and versions."""
UNLIKE = {
    "minilm_TA6": {
        "clean": "each task's own",
        "shuffled": "words in random order",
        "exchanged": "two tasks swapped",
        "others": "another task's, for each",
    },
    "mpnet_TA6": {
        "clean": "each task's own",
        "shuffled": "words in random order",
        "exchanged": "two tasks swapped",
    },
    "dinov2_small_TA4": {
        "clean": "each task's own",
        "fog": "in fog, severity 3",
        "gaussian_noise": "with noise, severity 3",
        "motion_blur": "blurred, severity 3",
        "exchanged": "two tasks swapped",
        "one": "the first task's, for all",
    },
}
"""Suites and kinds of samples, which are folders of docs/results, with their labels."""
AVERAGE = "accuracy.average"
PAPER_ROWS = (
    "featcal_paper_flan_t5",
    "featcal_paper_llama_3b",
    "featcal_paper_llama_3b-targets",
    "featcal",
)
"""Rows with the paper's settings. The first one that a suite has is taken."""


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table: the first column to the left, the others to the right."""
    rule = "|".join([":--", *["--:"] * (len(heads) - 1)])
    head, *body = (f"| {' | '.join(row)} |" for row in [heads, *lines])
    return "\n".join([head, f"|{rule}|", *body])


@cache
def results_of(name: str) -> Results:
    """Return the joined runs of a folder of docs/results, in the order of their paths.

    Times of files differ between checkouts.
    """
    return join({folder: read_run(folder) for folder in find_runs([RESULTS / name])})


def suites_with(kind: str) -> list[str]:
    """Return the suites that have a folder of this kind in docs/results."""
    folders = {path.name.removesuffix(f"-{kind}") for path in RESULTS.glob(f"*-{kind}")}
    return [suite for suite in (*SUITES, EIGHT, *REAL) if suite in folders]


def averages(suite: str) -> dict[str, dict[str, Any]]:
    """Return a suite's averages by row: that of task arithmetic if a repair is a merger, too."""
    records = summary(results_of(suite)).to_dict("records")
    return {row["row"]: row for row in reversed(records)}


def measured(results: Results) -> str:
    """Return the machine and the versions of runs."""
    run = next(iter(results.runs.values()))
    machine = run.device.get("accelerator") or (
        f"{run.device['cpu']} ({run.device['torch_threads']} thread)"
    )
    return f"{machine}, torch {run.versions['torch']}, transformers {run.versions['transformers']}"


def usual_machine() -> str:
    """Return a sentence on the machine and the versions of most runs."""
    return f"Measured on {measured(results_of(USUAL))}, unless a table names others."


def with_machine(text: str, results: Results) -> str:
    """Return a table, with the machine and the versions of its runs if they are not the usual."""
    machine = measured(results)
    return text if machine == measured(results_of(USUAL)) else f"{text}\n\n- measured on {machine}"


def percent(record: dict[str, Any]) -> str:
    """Return a row's average, and in brackets the share of the worst task's gap it recovers."""
    share = record.get("worst_share")
    text = f"{100 * record[AVERAGE]:.1f}"
    return text if share is None or share != share else f"{text} ({100 * share:.0f} %)"


def tasks_of(record: dict[str, Any]) -> list[str]:
    """Return the names of a record's accuracies by task."""
    return [key for key in record if key.startswith("accuracy.") and key != AVERAGE]


def average_and_missed(record: dict[str, Any], records: Iterable[dict[str, Any]]) -> str:
    """Return a row's average, and in brackets the most points that a task misses its expert by."""
    experts = next(r for r in records if r["row"] == "experts")
    missed = max(experts[task] - record[task] for task in tasks_of(experts))
    return f"{100 * record[AVERAGE]:.1f} ({100 * missed:.1f})"


def short_label(suite: str) -> str:
    """Return a suite's label for a figure or a table."""
    return (SUITES | REAL)[suite].replace("real pretrained weights", "pretrained")


def by_suite(
    suites: Sequence[str],
    rows: Mapping[tuple[str, str], str],
    cells: Mapping[tuple[str, ...], str],
) -> str:
    """Return a table with a line for each merger and row, and a column for each suite."""
    labels = SUITES | REAL | SHORT
    heads = ["", *(labels[suite].split(",")[0] for suite in suites)]
    lines = [[text, *(cells.get((s, *row), "-") for s in suites)] for row, text in rows.items()]
    return table(heads, lines)
