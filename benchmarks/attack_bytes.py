"""Random damage to every file that the package reads: noticed, or without effect.

    python benchmarks/attack_bytes.py [--damages 10000] [--only PATTERN] [--first-seed 0]

Each damage hits a fresh copy of small files, which are then read as a user would have them read.
The outcome must equal that of undamaged files, or the damage must be noticed: an error of the
package that names the file, or a line in the log that does and a result that was made anew.
Of files that the package did not write (experts, adapters) only raw exceptions count: nothing tells
what their tensors should be. Exits with 1 if an outcome is silently different, raw, or never comes.
"""

import argparse
import collections
import contextlib
import logging
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attacks.paths  # noqa: F401

# isort: split
from attacks.damages import damage
from attacks.files import KINDS, Kind
from attacks.judging import MOST_LINES, captured_log, is_own, lines_of

SAME, NOTICED, REFUSED = "no effect", "noticed, made anew", "refused"
ACCEPTED, SILENT, RAW, HANG, UNFIT = "accepted", "SILENT", "RAW", "HANG", "UNFIT MESSAGE"
_PATIENCE = 30  # seconds that reading may take
_MEMORY = 2**33  # bytes of address space beyond the present, so that a damaged size cannot end all


class Hang(BaseException):
    """Reading took too long; no Exception, so that nobody takes it for a damaged file."""


def main() -> None:
    """Damage files of every kind, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--only", default="", help="pattern of the kinds to damage")
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    kinds = [kind for kind in KINDS if re.search(options.only, kind.name)]
    share = options.damages / sum(kind.weight for kind in kinds)
    _limit_memory()
    failed = 0
    print("| files | damages | outcomes | s |\n|---|--:|---|--:|", flush=True)
    for kind in kinds:
        start = time.perf_counter()
        count = max(1, round(kind.weight * share))
        outcomes = attack(kind, count, options.first_seed)
        text = ", ".join(f"{outcome} {times}" for outcome, times in outcomes.most_common())
        print(f"| {kind.name} | {count} | {text} | {time.perf_counter() - start:.0f} |", flush=True)
        failed += sum(times for outcome, times in outcomes.items() if outcome.isupper())
    print(f"\n{failed} damages silently different, raw, without end, or with an unfit message")
    sys.exit(1 if failed else 0)


def attack(kind: Kind, count: int, first_seed: int = 0) -> "collections.Counter[str]":
    """Damage one kind of files many times; how often each outcome came."""
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="featcal-bytes-") as place, _quiet():
        whole, folder = Path(place, "whole"), Path(place, "damaged")
        whole.mkdir()
        kind.make(whole)
        shutil.copytree(whole, folder)
        expected = kind.read(folder)
        names = [path.relative_to(folder) for path in kind.files(whole_copy(whole, folder))]
        for seed in range(first_seed, first_seed + count):
            whole_copy(whole, folder)
            path = folder / names[seed % len(names)]
            done = damage(path, seed)
            outcome, detail = outcome_of(kind, folder, path, expected)
            outcomes[outcome] += 1
            if outcome.isupper() and outcomes[outcome] <= 5:
                print(f"{kind.name}, seed {seed}, {path.name}: {done}: {outcome}: {detail}",
                      file=sys.__stderr__, flush=True)  # fmt: skip
    return outcomes


def whole_copy(whole: Path, folder: Path) -> Path:
    """Replace a folder by a copy of the whole one."""
    shutil.rmtree(folder)
    shutil.copytree(whole, folder)
    return folder


def outcome_of(kind: Kind, folder: Path, path: Path, expected: Any) -> tuple[str, str]:
    """Outcome of reading a damaged file, with details for a closer look."""
    with captured_log() as messages:
        try:
            with _limited_time():
                found = kind.read(folder)
        except Hang:
            return HANG, f"more than {_PATIENCE} s"
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            if not is_own(error):
                return RAW, f"{type(error).__name__}: {message}"
            short = lines_of(str(error)) <= MOST_LINES
            named = _names(str(error), path) or kind.is_input or not kind.is_named
            return (REFUSED, "") if named and short else (UNFIT, message)
    if found == expected:
        return SAME, ""
    if kind.is_input:
        return ACCEPTED, ""
    if any(_names(text, path) for text in messages) and kind.core(found) == kind.core(expected):
        return NOTICED, ""
    return SILENT, "another outcome, and no line in the log names the file"


def _names(message: str, path: Path) -> bool:
    return path.name in message or str(path.parent) in message


@contextlib.contextmanager
def _limited_time() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave the screen to the attack's own table."""
    logging.disable(logging.NOTSET)
    shown = [handler for handler in logging.getLogger().handlers]
    logging.getLogger().handlers = [logging.NullHandler()]
    try:
        with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.redirect_stdout(nowhere):
                yield
    finally:
        logging.getLogger().handlers = shown


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, hard))


if __name__ == "__main__":
    main()
