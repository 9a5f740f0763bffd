"""Write the generated parts of README.md and docs/, their figures, and JSON Schemas.

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
from collections.abc import Callable
from pathlib import Path

from json_schemas import schema_texts
from result_figures import result_figures
from result_records import table
from result_tables import RESULT_PARTS

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PART = re.compile(
    r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(^<!-- end of (?P=name) -->)",
    re.DOTALL | re.MULTILINE,
)


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


def _benchmark(name: str) -> tuple[list[list[str]], str]:
    """Return the rows of a benchmark's table, and its first sentence on machine and versions."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:], text.strip().rpartition("\n\n")[2].partition(". ")[0]


def _left(heads: list[str], lines: list[list[str]]) -> str:
    return table(heads, lines).replace("--:", ":--")


KINDS = {
    "decoder": "language model",
    "reward model": "language model",
    "translator": "encoder-decoder",
    "text recognition": "encoder-decoder",
    "vision tower": "image classifier or encoder",
    "packed images": "image classifier or encoder",
    "image classifier": "image classifier or encoder",
    "speech encoder": "speech model",
    "speech model of waves": "speech model",
    "image-text model": "image-text model, samples of texts",
    "image-text model, images": "image-text model, samples with images",
}
"""Kind in the benchmark -> kind in the documentation, where they differ."""
MIXTURE = "mixture of experts"
FIRST = ("language model", MIXTURE, "encoder-decoder", "text classifier")


def model_types() -> str:
    """Return the tested model types by kind, with the modules that are not calibrated."""
    rows, versions = _benchmark("model_types")
    types: dict[str, dict[str, None]] = {kind: {} for kind in FIRST}
    stays: dict[str, dict[str, list[str]]] = {}
    for name, kind, *_, as_merged in (row for row in rows if row[1] != "mixture"):
        kind = KINDS.get(kind, kind)
        types.setdefault(kind, {})[f"`{name}`"] = None
        if parts := dict.fromkeys(re.findall(r"(\w+(?:\.\*)?)`", as_merged)):
            key = ", ".join(f"`{part}`" for part in parts)
            stays.setdefault(kind, {}).setdefault(key, []).append(f"`{name}`")
    outcomes = [outcome for _, outcome, *_ in _benchmark("mixtures")[0]]
    calibrated = sum(outcome.startswith("calibrated") for outcome in outcomes)
    types[MIXTURE] = {f"[{calibrated} types](#mixtures)": None}
    cells = {
        kind: "<br>".join(f"{parts}: {', '.join(names)}" for parts, names in groups.items())
        for kind, groups in stays.items()
    }
    cells[MIXTURE] = "routers, convolutions"
    lines = [[kind, ", ".join(names), cells.get(kind, "")] for kind, names in types.items()]
    heads = ["Models", "Model types that run", "Not calibrated, besides embeddings and heads"]
    largest = max((row[4] for row in rows), key=float)
    distance = f"Largest distance of a parameter, relative to its norm: {largest}."
    return f"{_left(heads, lines)}\n\n{distance} {versions}."


def mixtures() -> str:
    """Return the types of mixtures by the outcome for their routed experts."""
    rows, versions = _benchmark("mixtures")
    types: dict[str, list[str]] = {"calibrated": [], "as merged": [], "refused": []}
    for name, outcome, *_ in rows:
        kind, _, setting = outcome.partition(":")[0].partition(" with ")
        types[kind].append(f"{name} ({setting})" if setting else name)
    labels = {"as merged": "not calibrated"}
    lines = [[labels.get(kind, kind), ", ".join(names)] for kind, names in types.items()]
    largest = max((number for row in rows for number in row[3:6] if number), key=float)
    grouped = _left(["Routed experts", "Model types"], lines)
    return f"{grouped}\n\nLargest distance to the slow references: {largest}. {versions}."


def coverage() -> str:
    """Return the least and the median coverage of each kind of interval."""
    text = (ROOT / "benchmarks" / "results" / "interval_coverage.md").read_text(encoding="utf-8")
    head, _, *rows = (line[2:-2].split(" | ") for line in text.splitlines() if line[:1] == "|")
    kinds: dict[str, dict[str, list[str]]] = {}
    for kind, summary, *numbers in rows:
        kinds.setdefault(kind, {})[summary] = numbers
    lines = [
        [kind, *map("{} ({})".format, summaries["least"], summaries["median"])]
        for kind, summaries in kinds.items()
    ]
    return table([f"{head[0]}: least (median)", *head[2:]], lines)


PARTS: dict[str, Callable[[], str]] = {
    **RESULT_PARTS,
    "paper-commands": paper_commands,
    "paper-averages": paper_averages,
    "model-types": model_types,
    "mixtures": mixtures,
    "coverage": coverage,
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
    figures = {FIGURES / f"{name}.svg": text for name, text in result_figures().items()}
    written = {page: rewritten(page) for page in PAGES} | figures | schema_texts()
    stale = [
        path
        for path, text in written.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in stale:
        print(f"{'stale' if options.check else 'written'}: {path.relative_to(ROOT)}")
        if not options.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(written[path], encoding="utf-8")
    if stale and options.check:
        sys.exit("run: python scripts/write_tables.py")


if __name__ == "__main__":
    main()
