r"""FeatCal+ against the paper's settings and other corrections, over mergers, samples and draws.

    python benchmarks/plus_grid.py --results-dir kept --pool clip-vit-mini_TA6 \
        --upstreams simple_average task_arithmetic svc --samples 8 64 --seeds 42 43 44

One `method=compare` for each number of samples and draw; finished cells stay in `--results-dir`,
so that a command that was stopped, or asks for more, runs only what is missing. Corrections are
trained on the samples that FeatCal uses. Seconds are those of the method alone, with one thread,
and mean something on an idle machine only.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plus import figures, machine, publish
from rich.console import Console
from rich.progress import track

from fusion_bench_featcal.settings import PLUS

# Mergers beside those of `method=compare`, by their FusionBench config.
FURTHER = {"wudi_text": "featcal_mergers/wudi_language_models"}
UPSTREAMS = ("simple_average", "task_arithmetic", "ties_merging", "adamerging", "wudi", "svc")
OURS, WITHOUT_COPIES = "featcal:plus", "plus_without_copies"
# The paper's settings for T5 are the best of its settings on both text suites.
PAPERS = {
    "flan-t5-mini_TA6": "featcal:paper_flan_t5",
    "llama-mini_TA6": "featcal:paper_flan_t5-targets",
}
CORRECTIONS = ("surgery:calibration", "prob_surgery:calibration", "distillation")
FEATCAL = {"_target_": "fusion_bench_featcal.methods.FeatCal"}
MARGIN = 1e-9  # accuracies that differ by less are equal


@dataclass(frozen=True, order=True)
class Cell:
    """Every method on one merger, with one number of samples, in one draw."""

    upstream: str
    samples: int
    seed: int


def command(options: argparse.Namespace, samples: int, seed: int) -> list[str]:
    """The command of one comparison."""
    own = FEATCAL | {**PLUS, "augment": None, "samples_per_task": samples, "seed": seed}
    entry = json.dumps(own).replace('"', "")
    entries = [f"+method.post_merging_methods.{WITHOUT_COPIES}={entry}"]
    further = [name for name in options.upstreams if name in FURTHER]
    return [
        *(sys.executable, "-m", "fusion_bench.scripts.cli", "method=compare"),
        *(f"+method@method.upstream_mergers.{name}={FURTHER[name]}" for name in further),
        *(entries if WITHOUT_COPIES in options.rows else ()),
        f"modelpool={options.pool}",
        f"method.upstreams=[{','.join(options.upstreams)}]",
        "method.alone=[]",
        "method.references=[experts]",
        f"method.post_merging={json.dumps(options.rows)}",
        f"method.samples_per_task={samples}",
        f"method.seed={seed}",
        f"method.steps={options.steps}",
        f"method.results_dir={options.results_dir.resolve()}",
        f"path.log_dir={log_dir(options, samples, seed)}",
        "print_config=false",
    ]


def log_dir(options: argparse.Namespace, samples: int, seed: int) -> Path:
    """Folder of one comparison's reports."""
    return options.results_dir.resolve() / "logs" / f"{options.pool}-{samples}-{seed}"


def run(options: argparse.Namespace) -> Iterator[tuple[Cell, Any]]:
    """Run all comparisons; yield each merger's report as it is stored."""
    jobs = [(samples, seed) for samples in options.samples for seed in options.seeds]
    options.results_dir.mkdir(parents=True, exist_ok=True)
    for samples, seed in track(jobs, console=Console(stderr=True)):
        words = command(options, samples, seed)
        cwd = options.folder or options.results_dir
        done = subprocess.run(words, capture_output=True, text=True, cwd=cwd)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        for upstream in options.upstreams:
            report = log_dir(options, samples, seed) / upstream / "report.json"
            yield Cell(upstream, samples, seed), json.loads(report.read_text(encoding="utf-8"))


def overview(found: Mapping[Cell, Any], rows: Sequence[str]) -> str:
    """A Markdown table with a line for each merger and number of samples: means over draws."""
    named = [_shown(name, "") for name in rows]
    gaps = [name for name in rows if _is_paper(name) or name == OURS]
    heads = ["merger", "n", "merged", *named, *(f"worst gap: {_shown(name, '')}" for name in gaps)]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    for upstream, samples in dict.fromkeys((cell.upstream, cell.samples) for cell in found):
        reports = _reports(found, upstream, samples)
        means = {
            name: [*map(statistics.mean, zip(*(figures(r, name) for r in reports), strict=True))]
            for name in (upstream, *rows)
        }
        averages = [f"{means[name][0]:.1f}" for name in means]
        recovered = [f"{means[name][2]:.0f} %" for name in gaps]
        lines.append("| " + " | ".join([upstream, str(samples), *averages, *recovered]) + " |")
    return "\n".join(lines)


def _reports(found: Mapping[Cell, Any], upstream: str, samples: int) -> list[Any]:
    return [r for cell, r in found.items() if (cell.upstream, cell.samples) == (upstream, samples)]


def table(found: Mapping[Cell, Any], upstream: str, samples: int, rows: Sequence[str]) -> str:
    """A Markdown table of one merger with one number of samples: means over draws."""
    reports = _reports(found, upstream, samples)
    lines = [
        "| row | average | worst task | worst gap recovered | loss | seconds |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name in ("experts", upstream, *rows):
        average, worst, gap, seconds = zip(*(figures(r, name) for r in reports), strict=True)
        losses = [r.get("loss", {}).get(name, {}).get("average") for r in reports]
        loss = "-" if None in losses else f"{statistics.mean(losses):.3f}"
        shown = f"| {_shown(name, upstream)} | {_spread(average)} | {_spread(worst)} |"
        if name in rows:
            lines.append(f"{shown} {_spread(gap, 0)} | {loss} | {statistics.mean(seconds):.1f} |")
        else:
            lines.append(f"{shown} - | {loss} | - |")
    return "\n".join(lines)


def _is_paper(name: str) -> bool:
    return name in ("featcal", *PAPERS.values())


def _shown(name: str, upstream: str) -> str:
    if _is_paper(name):
        return "paper"
    words = {OURS: "**FeatCal+**", WITHOUT_COPIES: "FeatCal+ without copies"}
    return words.get(name, "merged" if name == upstream else name.replace("_", " "))


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """The mean, with the least and the most where there are several."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def verdict(found: Mapping[Cell, Any], rows: Sequence[str]) -> list[str]:
    """Sentences on cells: where FeatCal+ is ahead, and where a task ends below the merged model."""
    averages = {
        cell: {name: report["rows"][name]["average"] for name in rows}
        for cell, report in found.items()
    }
    lines = []
    if OURS in rows:
        papers = [name for name in rows if _is_paper(name)]
        others = {"the paper's settings": papers, "every other correction": CORRECTIONS}
        for words, names in others.items():
            present = [name for name in names if name in rows]
            if present:
                ahead = sum(
                    all(row[OURS] > row[name] + MARGIN for name in present)
                    for row in averages.values()
                )
                named = "" if words.startswith("the") else f" ({', '.join(present)})"
                lines.append(
                    f"FeatCal+ is above {words}{named} on the same samples in {ahead} of "
                    f"{len(found)} cells."
                )
    for name in rows:
        below = [
            f"{cell.upstream}, n = {cell.samples}, seed {cell.seed} ({', '.join(tasks)})"
            for cell, report in sorted(found.items())
            if (tasks := fallen(report, name, cell.upstream))
        ]
        where = f": {'; '.join(below)}" if below and name == OURS else ""
        lines.append(
            f"A task ends below the merged model with {_shown(name, '')} in {len(below)} of "
            f"{len(found)} cells{where}."
        )
    return lines


def fallen(report: Any, name: str, upstream: str) -> list[str]:
    """Tasks that end below the merged model."""
    own, merged = report["rows"][name], report["rows"][upstream]
    return [task for task in report["tasks"] if own[task] < merged[task] - MARGIN]


def main() -> None:
    """Read the options, run what is missing and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pool", default="clip-vit-mini_TA6")
    parser.add_argument("--upstreams", nargs="+", default=UPSTREAMS)
    parser.add_argument("--rows", nargs="+", help="rows of method=compare; default: all of ours")
    parser.add_argument("--samples", type=int, nargs="+", default=[8, 32, 64, 256])
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--steps", type=int, default=1000, help="of Surgery and ProbSurgery")
    parser.add_argument("--results-dir", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="run here: its config may define the pool")
    parser.add_argument("--out", type=Path, help="Markdown file")
    options = parser.parse_args()
    copies = [WITHOUT_COPIES] if "clip" in options.pool else []
    paper = PAPERS.get(options.pool, "featcal")
    options.rows = options.rows or [paper, *copies, OURS, *CORRECTIONS]
    options.upstreams = list(options.upstreams)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = dict(run(options))
    report = next(iter(found.values()))
    words = re.sub(r"--(results-dir|out|folder) \S+ ?", "", shlex.join(sys.argv[1:])).strip()
    parts = [
        f"`python benchmarks/plus_grid.py --results-dir ... {words}`: {report['suite']}, test "
        f"data, means over {len(options.seeds)} draws (least to most); {machine(report)}",
        "\n".join(f"- {line}" for line in verdict(found, options.rows)),
        overview(dict(sorted(found.items())), options.rows),
    ]
    for upstream in options.upstreams:
        for samples in options.samples:
            parts.append(f"**{upstream}, n = {samples}**")
            parts.append(table(found, upstream, samples, options.rows))
    publish(parts, options.out)


if __name__ == "__main__":
    main()
