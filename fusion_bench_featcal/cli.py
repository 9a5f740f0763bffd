"""The command `featcal`: work around the runs; the runs themselves start with `fusion_bench`.

Exit codes: 0 done, 1 a check found something, 2 a mistake in what was asked for.
"""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fusion_bench_featcal import __version__
from fusion_bench_featcal.folders.options import add_arguments
from fusion_bench_featcal.folders.request import Request
from fusion_bench_featcal.nearest_names import nearest_hint
from fusion_bench_featcal.report_verbs import report_command

_RUN_HELP = "log directory of a run, or a folder with several below it"


class UsageError(Exception):
    """A request that cannot be fulfilled; the message says why."""


@contextlib.contextmanager
def _refusing(*errors: type[Exception]) -> Iterator[None]:
    """Report these errors, and a ValueError, as mistakes in what was asked for."""
    try:
        yield
    except (ValueError, *errors) as error:
        raise UsageError(str(error)) from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `featcal`.

    Args:
        arguments: Words of the command line; those of the process by default.

    Returns:
        The exit code. A user's mistake gives one line on stderr; any other
        error a short block, or with HYDRA_FULL_ERROR=1 its traceback.
    """
    options = _parser().parse_args(arguments)
    # Read when torch is loaded: threads that wait spinning crawl on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from fusion_bench_featcal.error_block import error_block
    from fusion_bench_featcal.results import ReportError
    from fusion_bench_featcal.results.tables import without_codes

    try:
        return options.command(options) or 0
    except (UsageError, ReportError, OSError) as error:
        print(without_codes(f"featcal: error: {error}"), file=sys.stderr)
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        more = "traceback: set HYDRA_FULL_ERROR=1"
        print(without_codes(error_block(error, more, prefix="featcal: error")), file=sys.stderr)
    return 2


def explain_command(options: argparse.Namespace) -> int:
    """Say which experts each module of a calibrated model was made from, and what was read."""
    import json
    from dataclasses import asdict

    from fusion_bench_featcal.results.provenance import Provenance, explain

    found = Provenance.find(Path(options.run), options.preset)
    if options.json:
        changed = found.changed_files()
        content = asdict(found) | {"place": str(found.place), "changed_files": changed}
        print(json.dumps(content | {"experts_of": found.experts_of()}, indent=1))
    else:
        changed = explain(found)
    return 1 if changed else 0


def calibrate_command(options: argparse.Namespace) -> int:
    """Calibrate a merged model: folders of models and files of data in, a model folder out."""
    from fusion_bench_featcal.ending import ending_cleanly
    from fusion_bench_featcal.folders.job import run
    from fusion_bench_featcal.folders.options import (
        given_on_the_command_line,
        in_words_of_the_command,
    )
    from fusion_bench_featcal.folders.saving import how_to_go_on
    from fusion_bench_featcal.folders.verdict import NotImproved
    from fusion_bench_featcal.results.remarks import featcal_program
    from fusion_bench_featcal.settings import CalibrationError

    try:
        request = Request.of(given_on_the_command_line(vars(options), Request))
        with ending_cleanly(True, lambda: how_to_go_on(request)):
            out = run(request)
    except NotImproved as error:
        print(f"featcal: {error}", file=sys.stderr)
        return 1
    except (ValueError, CalibrationError) as error:
        raise UsageError(in_words_of_the_command(error)) from error
    if request.plan:
        return 0
    featcal, folder = featcal_program(), shlex.quote(str(out))
    print(f"saved: {out}\nnext: {featcal} report {folder}, {featcal} explain {folder}")
    return 0


def plan_command(options: argparse.Namespace) -> None:
    """Say what a calibration reads and writes, and its memory, before anything is loaded."""
    import json

    from fusion_bench_featcal.fusionbench.plan_run import run_request
    from fusion_bench_featcal.plan import plan_of, show_plan
    from fusion_bench_featcal.settings import CalibrationError

    lengths = {"length": options.length, "target_length": options.target_length}
    # torch says by an assertion that it was built without the device
    with _refusing(CalibrationError, RuntimeError, AssertionError):
        plan = plan_of(run_request(options.words, device=options.device, **lengths))
    if options.json:
        print(json.dumps(plan.as_dict(), indent=1))
    else:
        show_plan(plan)


def settings_command(options: argparse.Namespace) -> None:
    """List the settings of a method: defaults, accepted values and meaning."""
    from fusion_bench_featcal.setting_docs import method_names, settings_page

    methods = method_names()
    names = {name.rpartition("/")[2]: name for name in methods} | {name: name for name in methods}
    if options.method not in names:
        hint = nearest_hint(options.method, names)
        raise UsageError(f"no method {options.method!r}{hint}; there are {', '.join(methods)}")
    print(settings_page(names[options.method], as_json=options.json))


def suite_build_command(options: argparse.Namespace) -> None:
    """Train a bundled suite again, from the data in the package (in a source checkout)."""
    import importlib

    builder = Path(__file__).resolve().parents[1] / "scripts" / "suites"
    if not (builder / "build_suite.py").is_file():
        raise UsageError(
            "the installed package holds the suites but not their builder, scripts/suites of the "
            "project's source: unpack the sdist or clone the repository, then pip install "
            "--editable . there and run this again"
        )
    sys.path.insert(0, str(builder))
    build = importlib.import_module("build_suite").build
    with _refusing():
        print(f"built: {build(options.out, options.suite, options.seed, tasks=options.task)}")


def suite_check_command(options: argparse.Namespace) -> int:
    """Compare the suites' files with their recorded checksums."""
    from fusion_bench_featcal.suites.checksums import check
    from fusion_bench_featcal.suites.paths import SUITE_ROOT

    root = Path(options.folder) if options.folder else SUITE_ROOT
    if not root.is_dir():
        raise UsageError(f"no such folder: {root}")
    problems = check(root)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"all files as recorded: {root}")
    return 1 if problems else 0


def suite_path_command(options: argparse.Namespace) -> None:
    """Print where the bundled suites, or one file or folder of them, lie."""
    from fusion_bench_featcal.suites.paths import suite_path

    with _refusing():
        print(suite_path(options.name))


def example_command(options: argparse.Namespace) -> None:
    """List the examples, or copy one into a folder and print the commands that run it."""
    from fusion_bench_featcal.example_files import EXAMPLES, copy_example

    if options.name is None:
        width = max(map(len, EXAMPLES))
        for name, example in EXAMPLES.items():
            print(f"{name:{width}}  {example.summary}")
        print("\nfeatcal example NAME DIR copies one")
        return
    if options.folder is None:
        raise UsageError(f"featcal example {options.name} DIR: name a folder to copy it to")
    with _refusing():
        commands = copy_example(options.name, Path(options.folder))
    print("\n".join(commands))


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, and of an unknown option name the nearest."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            kind = "option" if name.startswith("-") else "argument"
            self.error(f"no {kind} {name}{nearest_hint(name, self._option_string_actions)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="featcal",
        description="Repair a merged model in a folder (featcal calibrate); tables and figures of "
        "runs, and the bundled suites. With FusionBench's pools runs start with: fusion_bench "
        "method=featcal modelpool=...; settings of both: featcal settings",
    )
    parser.add_argument("--version", action="version", version=f"featcal {__version__}")
    _add_commands(parser, _COMMANDS)
    return parser


def _add_commands(parser: argparse.ArgumentParser, commands: dict[str, Any]) -> None:
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (run, arguments) in commands.items():
        if isinstance(arguments, str):
            _add_commands(verbs.add_parser(name, help=arguments), run)
            continue
        text = (run.__doc__ or "").strip()
        verb = verbs.add_parser(name, help=text, description=text)
        verb.set_defaults(command=run)
        if isinstance(arguments, type):
            add_arguments(verb, arguments)
            continue
        for words, keywords in arguments.items():
            verb.add_argument(words, **keywords)


_RUNS = {"nargs": "+", "metavar": "RUN", "help": _RUN_HELP}
_LENGTH = {
    "type": int, "help": "tokens of a text (max_length, else 512), or an image's side in pixels "
    "where the model's config names none",
}  # fmt: skip
_TARGET_LENGTH = {"type": int, "default": 8, "help": "tokens a target (8)"}
_JSON = {"action": "store_true"}
_SUITES = ("clip-vit-mini", "flan-t5-mini", "llama-mini", "resnet-mini")
# Verb -> function and arguments (a dataclass that declares them, or words and keywords), or verbs
# below it and their help.
_SUITE_COMMANDS: dict[str, Any] = {
    "build": (suite_build_command, {
        "--out": {"metavar": "DIR", "required": True, "help": "a new folder for the build"},
        "--suite": {"choices": _SUITES, "default": _SUITES[0],
                    "help": f"the suite to build (default: {_SUITES[0]})"},
        "--seed": {"type": int, "default": 0, "help": "seed of the training (default: 0)"},
        "--task": {"action": "append", "metavar": "NAME",
                   "help": "build this task only (repeatable)"},
    }),
    "check": (suite_check_command, {
        "folder": {"nargs": "?", "metavar": "DIR", "help": "default: the bundled suites"},
    }),
    "path": (suite_path_command, {
        "name": {"nargs": "?", "default": "", "metavar": "NAME", "help": "default: all suites"},
    }),
}  # fmt: skip
_COMMANDS: dict[str, Any] = {
    "calibrate": (calibrate_command, Request),
    "report": (report_command, {
        "runs": _RUNS,
        "--out": {"metavar": "DIR", "help": "also write report.{json,csv,md} there"},
        "--html": {"metavar": "FILE", "help": "also write one page with tables and figures there, "
                   "for a browser"},
        "--figures": {"metavar": "DIR", "help": "also write figures (SVG) there"},
        "--against": {"metavar": "ROW", "help": "only the differences of all rows from one "
                      "(task_arithmetic/featcal), with Holm's correction; of runs of several "
                      "suites, over these"},
    }),
    "explain": (explain_command, {
        "run": {"metavar": "DIR", "help": "a saved model's folder, or a run's log directory"},
        "--preset": {"metavar": "NAME", "help": "in a log directory: the row featcal:NAME"},
        "--json": {**_JSON, "help": "print everything as JSON"},
    }),
    "plan": (plan_command, {
        "words": {"nargs": "+", "metavar": "WORD",
                  "help": "words of a run: modelpool=... method=featcal ..."},
        "--length": _LENGTH,
        "--target-length": _TARGET_LENGTH,
        "--device": {"default": "cpu", "help": "where to calibrate: cpu (default), cuda"},
        "--json": {**_JSON, "help": "print everything as JSON"},
    }),
    "settings": (settings_command, {
        "method": {"nargs": "?", "default": "featcal", "metavar": "METHOD",
                   "help": "default: featcal"},
        "--json": {**_JSON, "help": "print them as JSON"},
    }),
    "example": (example_command, {
        "name": {"nargs": "?", "metavar": "NAME", "help": "default: list them"},
        "folder": {"nargs": "?", "metavar": "DIR", "help": "a new or empty folder"},
    }),
    "suite": (_SUITE_COMMANDS, "build, check or locate the bundled suites"),
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
