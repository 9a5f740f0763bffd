"""Generated parts of docs/paper.md: the paper's numbers beside those of the bundled suites."""

import csv
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

from comparison_tables import comparison_rows
from reproduce import ITEMS, Item

from fusion_bench_featcal.results.tables import Grid

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
COMPARISON = RESULTS / "comparison"
MERGERS = ("simple_average", "task_arithmetic", "adamerging", "wudi")
METHODS = {"merged": "", "+ Surgery": "surgery", "+ ProbSurgery": "prob_surgery",
           "+ FeatCal": "featcal"}  # fmt: skip
SUITES = (
    "clip-vit-base-patch32_TA8", "clip-vit-large-patch14_TA8", "clip-vit-base-patch32_TALL14",
    "clip-vit-large-patch14_TALL14", "clip-vit-base-patch32_TALL20",
    "clip-vit-large-patch14_TALL20", "flan-t5-base_glue", "flan-t5-large_glue_lora",
    "mergebench_llama-3.2-3b-instruct", "mergebench_llama-3.1-8b-instruct",
)  # fmt: skip
OURS = {"clip-vit-mini_TA6": "grid", "flan-t5-mini_TA6": "flan-t5-mini",
        "llama-mini_TA6": "llama-mini"}  # fmt: skip
PAPERS_PRESET = {"flan-t5-mini_TA6": "featcal:paper_flan_t5",
                 "llama-mini_TA6": "featcal:paper_llama_3b-targets"}  # fmt: skip
CORRUPTIONS = ("clean", "gaussian_noise", "motion_blur", "fog", "mean")
Key = tuple[str, str, str, str]


def published() -> dict[Key, str]:
    """Values of the paper by setting, merger, post-merging method and metric."""
    path = ROOT / "fusion_bench_featcal" / "results" / "paper_results.csv"
    with path.open(encoding="utf-8") as file:
        return {
            (row["setting"], row["upstream"], row["post_merging"], row["metric"]): row["value"]
            for row in csv.DictReader(file)
        }


def commands_part() -> str:
    """Every item with its commands; those of methods that are not there yet as plain text."""
    return "\n\n".join("\n".join(_commands(item)) for item in ITEMS)


def _commands(item: Item) -> Iterator[str]:
    place = "not in the paper" if item.places == "-" else item.places
    yield f"**{place}:** {item.content}" + (
        "" if item.exists else f" (`method={item.method}` is not in this version)"
    )
    yield ""
    yield f"```{'bash' if item.exists else 'text'}"
    yield from item.commands(item.bundled)
    yield "# weights and data from the hub, never run here:"
    yield from item.commands(item.hub)
    yield "```"


def averages_table() -> str:
    """Average accuracy of mergers and what was run over them, the paper's suites and ours."""
    values = published()
    table = []
    for suite in SUITES:
        experts = values[suite, "", "experts", "average"]
        for merger in MERGERS:
            if (suite, merger, "", "average") in values:
                cells = [values[suite, merger, m, "average"] for m in METHODS.values()]
                table.append((suite, [merger, *cells, "", experts]))
    for suite, folder in OURS.items():
        table += [(f"**{suite}**", cells) for cells in _our_averages(suite, folder)]
    return Grid("suite", ["merger", *METHODS, "+ FeatCal+", "experts"], table).markdown()


def _our_averages(suite: str, folder: str) -> Iterator[list[str]]:
    rows = comparison_rows(COMPARISON / folder)
    values = {(row["upstream"], row["name"]): 100 * row["accuracy"]["average"] for row in rows}
    experts = next(100 * r["accuracy"]["average"] for r in rows if r["name"] == "experts")
    for merger in MERGERS:
        if (merger, merger) in values:
            featcal = PAPERS_PRESET.get(suite, "featcal")
            names = ("surgery", "prob_surgery", featcal, "featcal:plus")
            cells = [values[merger, merger], *(values[merger, name] for name in names), experts]
            yield [merger, *(f"{value:.1f}" for value in cells)]


def samples_table() -> str:
    """Accuracy by samples a task over task arithmetic: the paper's and the bundled suite's."""
    values, names = published(), ("surgery", "prob_surgery", "featcal")
    table = []
    for count in (8, 16, 32, 64, 128, 256, 512):
        setting = f"clip-vit-base-patch32_TA8 n={count}"
        paper = [values[setting, "task_arithmetic", name, "average"] for name in names]
        folder = COMPARISON / f"draws-clip-vit-mini_TA6-n{count}"
        ours = ["-"] * (len(names) + 1)
        if folder.is_dir():
            rows = {row["name"]: row["accuracy"]["average"] for row in comparison_rows(folder)}
            ours = [f"{100 * rows[name]:.1f}" for name in (*names, "featcal:plus")]
        table.append((str(count), [*paper, *ours]))
    heads = ["Surgery", "ProbSurgery", "FeatCal"]
    columns = [f"paper: {h}" for h in heads] + [f"ours: {h}" for h in (*heads, "FeatCal+")]
    return Grid("samples a task", columns, table).markdown()


def corruption_table() -> str:
    """Accuracy after calibration on corrupted images, the paper's."""
    values = published()
    table = []
    for head, name in [*METHODS.items()][1:]:
        settings = [f"clip-vit-base-patch32_TA8 corrupted={kind}" for kind in CORRUPTIONS]
        table.append((head, [values[s, "task_arithmetic", name, "average"] for s in settings]))
    heads = [kind.replace("_", " ") for kind in CORRUPTIONS]
    return Grid("paper", heads, table).markdown()


def cost_table() -> str:
    """Costs of a calibration: the paper's on one A800, ours on two cores."""
    values, setting = published(), "clip-vit-base-patch32_TA8 cost n=256, one A800"
    ours = {row["name"]: row["cost"] for row in comparison_rows(COMPARISON / "costs")}
    table = []
    for head, name in [*METHODS.items()][1:]:
        metrics = ("seconds", "gpu_energy_wh", "peak_host_rss_gib")
        paper = [values[setting, "task_arithmetic", name, metric] for metric in metrics]
        cost = ours[name if name == "featcal" else f"{name}:recompute"]
        cells = [f"{cost['seconds']:.1f}", f"{cost['peak_rss_bytes'] / 2**30:.2f}"]
        table.append((head, [*paper, *cells]))
    columns = ["paper: seconds", "paper: GPU energy, Wh", "paper: host memory, GiB",
               "ours: seconds", "ours: host memory, GiB"]  # fmt: skip
    return Grid("", columns, table).markdown()


def keep_plans() -> None:
    """Write what `featcal plan` says of the paper's suites."""
    presets = {"flan": "/paper_flan_t5", "mergebench_llama-3.2": "/paper_llama_3b",
               "mergebench_llama-3.1": "/paper_llama_8b"}  # fmt: skip
    plans = {}
    for suite in SUITES:
        method = "featcal" + next(
            (p for start, p in presets.items() if suite.startswith(start)), ""
        )
        words = ["featcal", "plan", f"modelpool={suite}", f"method={method}"]
        words += ["method.activations=device", "--json"]
        plan = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
        plans[suite] = {"method": method, "host": plan["host"], "read": plan["read"],
                        "features": plan["parts"]["features"]}  # fmt: skip
    content = json.dumps({"suites": plans}, indent=1)
    (RESULTS / "plans.json").write_text(f"{content}\n", encoding="utf-8")


def plans_table() -> str:
    """Memory and reads of the paper's suites by `featcal plan`."""
    plans = json.loads((RESULTS / "plans.json").read_text(encoding="utf-8"))
    table = [
        (suite, [plan["method"], f"{plan['host'] / 2**30:.1f}", f"{plan['features'] / 2**30:.1f}",
                 f"{plan['read'] / 1e9:.1f}"])
        for suite, plan in plans["suites"].items()
    ]  # fmt: skip
    columns = ["method", "memory, GiB", "of these features, GiB", "read, GB"]
    return Grid("suite", columns, table).markdown()
