"""Run `method=featcal` on every stock model pool of FusionBench, with stand-ins for downloads.

    python benchmarks/pools.py [--only PATTERN] [--out benchmarks/results/pools.md]

Takes minutes; fails where an outcome is not the expected one (`stock_pools/expected.py`).
"""

import argparse
import logging
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from stock_pools.expected import EXPECTED, RUNS, Expected, expected_of, line_of
from stock_pools.running import DATA, NAMES, run
from stock_pools.stand_ins import StandIns

SHOWN = {DATA: "+method.calibration_data.TASK=FILE"}
RESULTS = Path(__file__).parent / "results" / "pools.md"


def outcome(name: str, stand_ins: StandIns, words: Sequence[str] = ()) -> str:
    """Run a pool; the line that refuses it, empty where it runs."""
    try:
        run(name, stand_ins, words)
    except Exception as error:  # FusionBench's own, too
        return line_of(error)
    return RUNS


def agrees(expected: str, line: str) -> bool:
    """Tell whether a line is the expected one."""
    return not line if expected == RUNS else re.search(expected, line) is not None


def short(line: str, stand_ins: StandIns) -> str:
    """A refusal as a cell of a table."""
    line = line.replace(str(stand_ins.root), "").replace("|", "\\|")
    return f"refused: {line if len(line) < 160 else line[:160] + ' ...'}" if line else "runs"


def summary(lines: dict[str, tuple[str, str | None]]) -> list[str]:
    """Rows of configs with one expectation."""
    rows = [
        "| configs | models | as it is | what it lacks | with that |",
        "|---|---|---|---|---|",
    ]
    for entry in EXPECTED:
        names = [name for name in lines if expected_of(name) is entry]
        if names:
            shown = f"`{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            first, then = lines[names[0]]
            rows.append(
                f"| {shown} | {entry.models} | {'runs' if not first else 'refused'} | "
                f"{entry.missing or '-'} | {_outcome(entry, then)} |"
            )
    return rows


def _outcome(entry: Expected, then: str | None) -> str:
    if then is None:
        return "-"
    return "runs" if not then else f"refused: {entry.lacking}"


def page(lines: dict[str, tuple[str, str | None]], stand_ins: StandIns) -> str:
    """The whole page."""
    runs = sum(not first for first, _ in lines.values())
    later = sum(bool(first) and then == RUNS for first, then in lines.values())
    text = [
        *summary(lines),
        "",
        f"- {len(lines)} configs: {runs} run as they are, {later} with what they lack, "
        f"{len(lines) - runs - later} do not; all are refused in one line, before a model is "
        "loaded where they are refused as they are",
        f"- tried with fusion-bench {version('fusion-bench')}, transformers "
        f"{version('transformers')} on tiny random models and made-up data, one per model type, in "
        "the place of hub ids",
        "",
        "**Every config**",
        "",
        "| config | as it is | words added | with them |",
        "|---|---|---|---|",
    ]
    for name, (first, then) in lines.items():
        given = [SHOWN.get(word, word) for word in expected_of(name).words_of(name)]
        words = " ".join(f"`{word}`" for word in given) or "-"
        cell = "-" if then is None else short(then, stand_ins)
        text.append(f"| {name} | {short(first, stand_ins)} | {words} | {cell} |")
    return "\n".join(text) + "\n"


def main() -> None:
    """Run all pools and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression of config names")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    out = options.out.resolve()
    logging.disable(logging.CRITICAL)
    lines: dict[str, tuple[str, str | None]] = {}
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        stand_ins = StandIns(Path(folder))
        os.chdir(folder)
        for name in NAMES:
            if not re.search(options.only, name):
                continue
            entry = expected_of(name)
            first = outcome(name, stand_ins)
            then = outcome(name, stand_ins, entry.words_of(name)) if entry.words else None
            lines[name] = first, then
            if not (agrees(entry.refused, first) and (then is None or agrees(entry.then, then))):
                wrong.append(f"{name}: {first!r}, {then!r}")
        os.chdir(out.parent)
        out.write_text(page(lines, stand_ins), encoding="utf-8")
    sys.exit("\n".join(["not as expected:", *wrong]) if wrong else 0)


if __name__ == "__main__":
    main()
