"""Mutate `core`, `rules` and `run` with mutmut, and list the mutants that no test notices.

    python benchmarks/mutations.py [--sample 400] [--minutes 120] [--jobs 2]

`[tool.mutmut]` in pyproject.toml names the mutated packages and their tests. The sample is the same
in every run. The folder `mutants` keeps results, so that a later run continues. Writes
results/mutations.md.
"""

import argparse
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "mutations.md"
NOTICED = {"killed", "timeout", "segfault", "suspicious"}


def mutmut(*words: str) -> str:
    """Return the output of a command of mutmut."""
    command = [sys.executable, "-m", "mutmut", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def run(*words: str, minutes: float | None = None) -> None:
    """Run mutants for a limited time. Progress goes to this program's output."""
    command = [sys.executable, "-m", "mutmut", "run", *words]
    try:
        subprocess.run(command, cwd=ROOT, timeout=minutes and 60 * minutes)
    except subprocess.TimeoutExpired:
        print(f"\nstopped after {minutes:g} minutes")


def statuses() -> dict[str, str]:
    """Return the status of each mutant."""
    lines = mutmut("results", "--all", "true").splitlines()
    return dict(line.strip().split(": ") for line in lines if ": " in line)


def change(mutant: str) -> str:
    """Return the removed and the added line of a mutant, as cells of a table."""
    lines = mutmut("show", mutant).splitlines()
    cells = []
    for sign in "-+":
        code = [ln[1:].strip() for ln in lines if ln.startswith(sign) and ln[:3] != 3 * sign]
        cells.append(f"`{' '.join(code)}`".replace("|", "\\|") if code else "")
    return " | ".join(cells)


def report(results: dict[str, str]) -> str:
    """Return a page with the number of mutants by status and the survivors."""
    counts = Counter("noticed" if s in NOTICED else s for s in results.values())
    lines = [
        "# Mutants of `core`, `rules` and `run`\n",
        f"By `python benchmarks/mutations.py`. {len(results)} mutants in all, "
        + ", ".join(f"{status}: {count}" for status, count in sorted(counts.items()))
        + ". Some survivors do the same as the original, for example without `strict`.\n",
        "| survivor | line | mutant |\n|---|---|---|",
    ]
    for mutant, status in results.items():
        if status in ("survived", "no tests"):
            name = mutant.removeprefix("fusion_bench_featcal.").replace("ǁ", ".")
            lines.append(f"| {name.replace('.x_', '.').replace('.x.', '.')} | {change(mutant)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run mutmut and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="number of mutants, by default all")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    run("none")  # writes the mutants and finds the tests of each function
    names = sorted(statuses())
    if options.sample is not None:
        names = random.Random(0).sample(names, options.sample)
    run("--max-children", str(options.jobs), *names, minutes=options.minutes)
    results = statuses()
    if not NOTICED & {*results.values()}:
        sys.exit("no mutant was tested: see above")
    RESULT.write_text(report(results), encoding="utf-8")
    print(RESULT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
