"""Check that tests detect small mistakes in the package.

    python benchmarks/mutations.py [--only PATTERN] [--list] [--whole] [--jobs 1]

Each entry of the tables in `mistakes/` is a mistake. It is applied to a temporary copy of the
project, on which the entry's tests run. With `--whole`, `make test` also runs on survivors. Exits
with 1 if a mistake survives that is not listed as known, or if an entry no longer applies.
"""

import argparse
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from mistakes import core, edge, families, loop, methods, plus, results, studies
from mistakes.entry import Mutation
from mistakes.workplaces import ROOT, Workplaces

TABLES = (core, loop, plus, families, methods, results, studies, edge)
MUTATIONS = [mutation for table in TABLES for mutation in table.MUTATIONS]

PACKAGE = "fusion_bench_featcal"
OWN_SECONDS, WHOLE_SECONDS = 300, 3600
"""A mutation that makes the tests run longer than this is noticed, too."""

MAKE_TEST = ("-m", "not gpu and not slow", "--numprocesses", "2", "--dist", "loadfile")

MISTAKES_OF_THE_ENTRY = {
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "SyntaxError",
    "UnboundLocalError",
}
"""Errors of code that could not run at all, which prove nothing about the tests."""


@dataclass(frozen=True)
class Result:
    """Outcome of one mutation.

    Attributes:
        status: `killed`, `survived` or `invalid`.
        by: The test that failed, the reason why the entry is known, or the mistake in the entry.
        seconds: Duration of the tests.
    """

    status: str
    by: str
    seconds: float


def flaw_of(mutation: Mutation) -> str:
    """Return the reason why an entry does not apply to the project, or an empty text."""
    path = ROOT / PACKAGE / mutation.file
    if not path.is_file():
        return f"there is no {PACKAGE}/{mutation.file}"
    text = path.read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        return f"{mutation.file} has its old text {text.count(mutation.old)} times, not once"
    missing = [name for name in tests_of(mutation) if not (ROOT / name.split("::")[0]).exists()]
    if missing:
        return f"there is no {missing[0]}"
    try:
        compile(text.replace(mutation.old, mutation.new), mutation.file, "exec")
    except SyntaxError as error:
        return f"its new text is no Python: {error}"
    return ""


def tests_of(mutation: Mutation) -> list[str]:
    """Return the paths of an entry's tests."""
    return [f"tests/{name}" for name in mutation.tests.split()]


def selection_of(names: Sequence[str]) -> list[str]:
    """Return pytest arguments for some tests. Slow tests only run if they are named."""
    slow = "" if any("::" in name for name in names) else " and not slow"
    return ["-m", f"not gpu{slow}", *names]


@contextmanager
def mutated(path: Path, mutation: Mutation) -> Iterator[None]:
    """Context in which a file has the mutation."""
    text = path.read_text(encoding="utf-8")

    def write(content: str) -> None:
        path.write_text(content, encoding="utf-8")
        # Bytecode is identified by size and second of the source, which may both stay equal.
        Path(cache_from_source(str(path))).unlink(missing_ok=True)

    write(text.replace(mutation.old, mutation.new))
    try:
        yield
    finally:
        write(text)


def try_mutation(mutation: Mutation, places: Workplaces, *, whole: bool) -> Result:
    """Run an entry's tests and, with `whole`, `make test`, on the mutated package."""
    start = time.perf_counter()
    with places.copy() as copy, mutated(copy / PACKAGE / mutation.file, mutation):
        selection = selection_of(tests_of(mutation))
        status, by = judged(*places.tests(copy, selection, OWN_SECONDS), OWN_SECONDS)
        if whole and status == "survived":
            status, by = judged(*places.tests(copy, MAKE_TEST, WHOLE_SECONDS), WHOLE_SECONDS)
    return Result(status, by or mutation.reason, time.perf_counter() - start)


def judged(code: int | None, output: str, limit: float) -> tuple[str, str]:
    """Return the status of a mutation, and the deciding test, from a run of the tests."""
    if code == 0:
        return "survived", ""
    if code is None:
        return "killed", f"limit of {limit:g} s"
    failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+?::\w+)", output, re.MULTILINE)
    error = re.search(r"^E +(\w+)(?::|$)", output, re.MULTILINE)
    if code != 1 or failed is None:
        return "invalid", " ".join(output.split()[-40:])
    if error is not None and error[1] in MISTAKES_OF_THE_ENTRY:
        return "invalid", f"{error[1]} in {failed[1]}"
    return "killed", failed[1]


def check_package(places: Workplaces) -> None:
    """Stop if tests would run another package than the copy's."""
    with places.copy() as copy:
        where = f"import {PACKAGE}; print({PACKAGE}.__file__)"
        _, output = places.run(copy, ["-c", where], OWN_SECONDS)
        if not output.strip().startswith(str(copy)):
            sys.exit(f"the tests would run another package than the copy's: {output.strip()}")


def check_killers(done: Sequence[Result], places: Workplaces) -> None:
    """Refuse results of tests that also fail without any mutation."""
    killers = sorted({f"tests/{r.by}" for r in done if r.status == "killed" and "::" in r.by})
    if not killers:
        return
    tell(f"running the {len(killers)} tests that noticed something on the package as it is")
    with places.copy() as copy:
        code, output = places.tests(copy, ["-m", "not gpu", *killers], WHOLE_SECONDS)
    if code != 0:
        sys.exit(f"tests fail without any mutation:\n{output[-3000:]}")


def chosen_by(pattern: str) -> list[Mutation]:
    """Return entries whose name or file matches a pattern."""
    return [m for m in MUTATIONS if fnmatchcase(f"{m.name} {m.file}", f"*{pattern}*")]


def run_all(mutations: Sequence[Mutation], jobs: int, *, whole: bool) -> list[Result]:
    """Try all mutations, with a line on stderr for each."""
    done: list[Result] = []
    with Workplaces(jobs) as places:
        check_package(places)
        tried = places.pool.map(lambda m: try_mutation(m, places, whole=whole), mutations)
        for mutation, result in zip(mutations, tried, strict=True):
            done.append(result)
            count = f"{len(done)}/{len(mutations)}"
            outcome = f"{result.status} {result.by} ({result.seconds:.0f} s)"
            tell(f"{count} {mutation.name}: {outcome}")
        check_killers(done, places)
    return done


def tell(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)


def show(mutations: Sequence[Mutation], done: Sequence[Result]) -> None:
    """Print the table of results."""
    print("| mutation | place | killed by | seconds |\n|---|---|---|--:|")
    for mutation, result in zip(mutations, done, strict=True):
        by = result.by if result.status == "killed" else f"**{result.status}** {result.by}"
        print(f"| {mutation.name} | `{mutation.file}` | {by} | {result.seconds:.0f} |")
    killed = sum(result.status == "killed" for result in done)
    print(f"\n{killed} of {len(done)} killed")


def stop(*_: Any) -> None:
    """End on a signal, so that contexts clean up."""
    sys.exit("interrupted")


def main() -> None:
    """Try the chosen mutations."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="pattern in the name or file of entries")
    parser.add_argument("--list", action="store_true", help="list the entries, run nothing")
    parser.add_argument("--whole", action="store_true", help="survivors meet all of make test")
    parser.add_argument("--jobs", type=int, default=1, help="mutations tried at a time")
    options = parser.parse_args()
    mutations = chosen_by(options.only)
    if not mutations:
        parser.error(f"no entry has {options.only!r} in its name or file")
    flaws = {m.name: flaw for m in mutations if (flaw := flaw_of(m))}
    if flaws:
        sys.exit("\n".join(f"{name}: no longer applies: {flaw}" for name, flaw in flaws.items()))
    if options.list:
        for mutation in mutations:
            print(f"{mutation.file}: {mutation.name} ({mutation.tests})")
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    done = run_all(mutations, options.jobs, whole=options.whole)
    print(f"Commit {commit}, Python {platform.python_version()}, {platform.machine()}\n")
    show(mutations, done)
    bad = [
        result.status == "invalid" or (result.status == "survived" and not mutation.reason)
        for mutation, result in zip(mutations, done, strict=True)
    ]
    sys.exit(1 if any(bad) else 0)


if __name__ == "__main__":
    main()
