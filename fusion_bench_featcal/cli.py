"""The command `featcal`: calibrates folders, plans runs of `fusion_bench` and reports them.

Exit codes: 0 success, 1 a check failed, 2 a mistake in the arguments.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from fusion_bench_featcal import __version__
from fusion_bench_featcal.errors.masking import masked
from fusion_bench_featcal.errors.nearest_names import nearest_hint
from fusion_bench_featcal.errors.place import error_context
from fusion_bench_featcal.folders.options import add_arguments
from fusion_bench_featcal.folders.request import SETTABLE, Request
from fusion_bench_featcal.run.torchrun import end_after_others, is_first_process


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `featcal` with arguments (the process's by default), and return the exit code.

    A user's mistake is printed as one line on stderr. Any other error is raised.
    """
    parser = _parser()
    if "_ARGCOMPLETE" in os.environ:  # set by a shell that completes a command
        import argcomplete

        argcomplete.autocomplete(parser)
    options = parser.parse_args(arguments)
    # Read when torch is loaded: with spinning threads a busy machine is many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        with error_context():  # a panic of a library becomes an error
            return options.command(options) or 0
    except BrokenPipeError:  # the reader, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        # Imported here, because numpy's import takes a quarter of a second.
        from fusion_bench_featcal.errors.block import error_block, is_bug
        from fusion_bench_featcal.results.tables import without_codes

        if is_bug(error):
            raise
        print(without_codes(error_block(error, prefix="featcal: error")), file=sys.stderr)
    return 2


def calibrate_command(options: argparse.Namespace) -> int:
    """Repair a merged model with folders of models and files of data, and save it to a folder."""
    from fusion_bench_featcal.errors import NotImproved
    from fusion_bench_featcal.errors.signals import exit_code, interruptions
    from fusion_bench_featcal.folders import calibrate_request
    from fusion_bench_featcal.folders.options import command_line_options
    from fusion_bench_featcal.folders.read_request import read_request
    from fusion_bench_featcal.run.torchrun import torchrun_processes

    with torchrun_processes() as processes:
        request = read_request(command_line_options(vars(options), Request))
        try:
            with interruptions():
                out = calibrate_request(request, processes)
        except NotImproved as error:
            print(f"featcal: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt as error:
            advice = f": --resume continues from {request.blocks_folder}" * request.has_blocks
            if is_first_process():
                print(f"featcal: interrupted{advice}", file=sys.stderr)
            return exit_code(error)
    if is_first_process() and not request.plan:
        from fusion_bench_featcal.results.remarks import typed_path

        print(f"saved: {out}\nnext: featcal report {typed_path(out)}")
    return 0


def check_command(options: argparse.Namespace) -> int:
    """Check that a merged model matches its merge config, or is its base with one adapter."""
    from fusion_bench_featcal.folders.check import check_merge
    from fusion_bench_featcal.folders.options import command_line_options

    chosen = command_line_options(vars(options), Request)
    sentences, is_right = check_merge(chosen["merged"], chosen.get("base"), chosen.get("expert"))
    print(masked("\n".join(sentences)))
    return int(not is_right)


def report_command(options: argparse.Namespace) -> None:
    """Print the tables of runs and comparisons. With --out and other options, also write files."""
    from fusion_bench_featcal.lab.report import report

    report(options)


def plan_command(options: argparse.Namespace) -> None:
    """Show downloads, reads and files of a calibration, or estimate one from a model's shapes."""
    if options.shapes:
        return _estimate(options)
    if not options.words:
        raise ValueError("plan needs the arguments of a run, or --shapes FOLDER")

    from fusion_bench_featcal.fusionbench.plan_run import plan_run
    from fusion_bench_featcal.models.plan import show_plan

    plan = plan_run(options.words)
    if options.json:
        print(masked(json.dumps(plan.as_dict(), indent=1)))
    else:
        show_plan(plan)


def _estimate(options: argparse.Namespace) -> None:
    """Print what a calibration of a model takes, from its config.json."""
    from fusion_bench_featcal.models.fits import fit_lines
    from fusion_bench_featcal.models.shapes import shapes_of, show_shapes

    if options.words:
        raise ValueError(
            f"--shapes takes no arguments of a run: leave out {' '.join(options.words)}"
        )
    shapes = shapes_of(options.shapes, tokens=options.tokens, option="--shapes")
    estimate = partial(shapes.estimate, tasks=options.tasks, samples=options.samples)
    estimates = {"FeatCal": estimate(plus=False), "FeatCal+": estimate(plus=True)}
    if options.json:
        print(json.dumps({name: vars(one) for name, one in estimates.items()}, indent=1))
    else:
        show_shapes(shapes, estimates)
        for name, one in estimates.items():
            print("\n".join([f"{name}:", *fit_lines(one)]))


def settings_command(options: argparse.Namespace) -> None:
    """List the settings of a method: defaults, accepted values and meaning."""
    from fusion_bench_featcal.lab.settings_page import method_names, settings_page

    methods = method_names()
    names = {name.rpartition("/")[2]: name for name in methods} | {name: name for name in methods}
    if options.method not in names:
        hint = nearest_hint(options.method, names)
        raise ValueError(f"no method {options.method!r}{hint}; there are {', '.join(methods)}")
    print(settings_page(names[options.method], as_json=options.json))


def list_command(options: argparse.Namespace) -> None:
    """List methods, merging methods, model pools, families and model types."""
    from fusion_bench_featcal.lab.listing import listing

    print(listing())


def suite_path_command(options: argparse.Namespace) -> None:
    """Print the path of the bundled suites, or of one file or folder of them."""
    from fusion_bench_featcal.files.suite_paths import suite_path

    print(suite_path(options.name))


class _Parser(argparse.ArgumentParser):
    """A parser with errors of one line. For an unknown option they name the nearest one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name, _, value = unknown[0].partition("=")
            kind = "option" if name.startswith("-") else "argument"
            options, forms = self._option_string_actions, []
            if "--set" in options:  # a typed option may be a setting, or its first word
                value = value or [*args, "..."][args.index(unknown[0]) + 1]
                texts = [(setting, f"--set {setting}={value}") for setting in reversed(SETTABLE)]
                forms = [(setting.partition("_")[0], text) for setting, text in texts] + texts
            self.error(f"no {kind} {name}{nearest_hint(name, options, forms)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        if not is_first_process():
            end_after_others()
        self.exit(2, masked(f"{self.prog}: error: {message}; see {self.prog} --help\n"))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="featcal",
        description="Repair a merged model in a folder (featcal calibrate), and show results. "
        "To repair a merged model of a FusionBench pool, run fusion_bench method=featcal "
        "modelpool=... To list the settings of both commands, run featcal settings",
    )
    parser.add_argument("--version", action="version", version=f"featcal {__version__}")
    options: Any = {"title": "commands", "required": True, "metavar": "COMMAND"}
    commands = parser.add_subparsers(**options)
    add_arguments(_add_command(commands, "calibrate", calibrate_command, "repair"), Request)
    check = _add_command(commands, "check", check_command)
    add_arguments(check, Request, "merged", "base", "expert")

    report = _add_command(commands, "report", report_command)
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="log directories of runs, or folders that hold them"
    )
    report.add_argument("--metric", help="a metric other than accuracy, such as loss")
    report.add_argument(
        "--out", metavar="DIR", help="also write report.csv, report.md and lines.csv to this folder"
    )
    report.add_argument("--html", metavar="FILE", help="also write an HTML page to this file")
    report.add_argument("--figures", metavar="DIR", help="also write figures to this folder")
    report.add_argument("--figure-format", choices=("svg", "pdf"), help="svg (default) or pdf")
    printed = report.add_mutually_exclusive_group()
    printed.add_argument("--markdown", action="store_true", help="print Markdown")
    printed.add_argument("--latex", action="store_true", help="print LaTeX tables (booktabs)")
    report.add_argument(
        "--against", metavar="ROW",
        help="show only the differences from one method, such as task_arithmetic/featcal, with "
        "Holm's correction",
    )  # fmt: skip

    plan = _add_command(commands, "plan", plan_command)
    plan.add_argument(
        "words", nargs="*", metavar="WORD", help="arguments of a run: modelpool=... ..."
    )
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    plan.add_argument("-m", "--multirun", action="store_true", help="plan a sweep")
    plan.add_argument(
        "--shapes", metavar="FOLDER",
        help="instead of planning a run, estimate the reads, operations and memory for a model "
        "from its config.json",
    )  # fmt: skip
    for name, default in {"tasks": 3, "samples": 256, "tokens": 512}.items():
        plan.add_argument(
            f"--{name}", type=_positive_integer, default=default, metavar="N",
            help=f"number assumed by --shapes (default: {default})",
        )  # fmt: skip

    settings = _add_command(commands, "settings", settings_command)
    settings.add_argument("method", nargs="?", default="featcal", metavar="METHOD")
    settings.add_argument("--json", action="store_true", help="print them as JSON")

    _add_command(commands, "ls", list_command)
    suite = commands.add_parser("suite", help="locate the bundled suites")
    path = _add_command(suite.add_subparsers(**options), "path", suite_path_command)
    path.add_argument("name", nargs="?", default="", metavar="NAME", help="default: all suites")
    return parser


def _positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)


def _add_command(
    commands: Any, name: str, function: Callable[..., Any], *aliases: str
) -> argparse.ArgumentParser:
    about = function.__doc__
    parser = commands.add_parser(name, help=about, description=about, aliases=aliases)
    parser.set_defaults(command=function)
    return parser
