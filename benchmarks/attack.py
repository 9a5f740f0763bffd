"""Every case of misuse, bad luck and bad data: right, or refused with a message that says where.

    python benchmarks/attack.py [--only PATTERN] [--list] [--json FILE] [--without-slow] [--loud]

Each case builds its situation from tiny models and data, runs it through Python or the command, and
is judged: `right` (an independent computation agrees), `refused` (an error of the package, at most
10 lines of 80 columns, that names the place), `WRONG` (another result or message), or `RAW` (an
exception that is not the package's, or a traceback on the screen). Exits with 1 if any case is
WRONG or RAW. Byte damage in bulk: benchmarks/attack_bytes.py.
"""

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import TextIO

import attacks.paths

# isort: split
import attacks.bytes_cases
import attacks.calibrate_cases
import attacks.data_cases
import attacks.ending_cases
import attacks.file_cases
import attacks.hub_cases
import attacks.image_cases
import attacks.message_cases
import attacks.model_cases
import attacks.reader_cases
import attacks.recipe_cases
import attacks.results_cases
import attacks.saving_cases
import attacks.screen_cases
import attacks.settings_cases
import attacks.stranger_cases  # noqa: F401
from attacks.judging import CASES, judge


def main() -> None:
    """Run the cases and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="pattern of the cases to run")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--json", type=Path, default=Path("outputs/attack.json"))
    parser.add_argument("--without-slow", action="store_true")
    parser.add_argument("--loud", action="store_true", help="show what the cases print")
    options = parser.parse_args()
    chosen = [
        attack
        for attack in CASES
        if re.search(options.only, attack.name) and not (attack.slow and options.without_slow)
    ]
    if options.list:
        print("\n".join(attack.name for attack in chosen))
        return
    path = options.json.absolute()
    screen = sys.stdout if options.loud else _own_screen()
    print("| case | outcome | lines | s | first line |\n|---|---|--:|--:|---|", file=screen)
    verdicts = []
    for attack in chosen:
        start = time.perf_counter()
        verdict = judge(attack)
        verdicts.append(verdict)
        seconds = time.perf_counter() - start
        message = verdict.first_line.replace("|", "/")[:200]
        row = f"{verdict.case} | {verdict.outcome} | {verdict.lines} | {seconds:.1f} | {message}"
        print(f"| {row} |", file=screen, flush=True)
    failed = sum(not verdict.passed for verdict in verdicts)
    print(f"\n{len(verdicts)} cases: {failed} wrong or raw", file=screen, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([verdict.as_dict() for verdict in verdicts], indent=1) + "\n")
    sys.exit(1 if failed else 0)


def _own_screen() -> TextIO:
    """A stream to the screen for the table alone; what the cases print goes nowhere."""
    screen = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return screen


if __name__ == "__main__":
    main()
