"""The command `featcal`: work around the runs; the runs themselves start with `fusion_bench`.

Exit codes: 0 done, 1 a check found something, 2 a mistake in what was asked for.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fusion_bench_featcal import __version__

if TYPE_CHECKING:
    from fusion_bench_featcal.results.find import Found

_RUN_HELP = "log directory of a run, or a folder with several below it"


class UsageError(Exception):
    """A request that cannot be fulfilled; the message says why."""


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

    try:
        return options.command(options)
    except (UsageError, ReportError, OSError) as error:
        print(f"featcal: error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        more = "traceback: set HYDRA_FULL_ERROR=1"
        print(error_block(error, more, prefix="featcal: error"), file=sys.stderr)
        return 2


def report_command(options: argparse.Namespace) -> int:
    """Print (and with --out write) the tables of runs and comparisons from what they left."""
    from fusion_bench_featcal.results import Report
    from fusion_bench_featcal.results.find import find
    from fusion_bench_featcal.results.summary import summarise
    from fusion_bench_featcal.results.views import show_combined, write_combined

    found = find(options.runs)
    if not found.runs:
        raise UsageError(f"no run in or below {', '.join(options.runs)}")
    if found.comparisons:
        return _report_comparisons(found, options.out)
    runs = found.runs
    summary = summarise(runs)
    # Write first: a reader who sees the table can rely on the files.
    written = write_combined(summary, options.out) if options.out else None
    if len(runs) == 1:
        # One run's own table has its tasks, and what made it.
        Report.load(runs[0]).show()
    show_combined(summary, tasks=len(runs) > 1)
    if written:
        print(f"written: {written.parent}")
    return 0


def _report_comparisons(found: "Found", out: str | None) -> int:
    """All runs in the tables of `method=compare`, with what failed there."""
    from fusion_bench_featcal.results.summary import summarise
    from fusion_bench_featcal.results.views import show_side_by_side, write_side_by_side

    summary = summarise(found.runs, found.failed)
    written = write_side_by_side(summary, out, "--out") if out else None
    show_side_by_side(summary)
    if written:
        print(f"written: {written.parent}")
    return 0


def plot_command(options: argparse.Namespace) -> int:
    """Draw the figures of runs and comparisons: into each one's folder, or below --out."""
    from fusion_bench_featcal.results.comparison_figures import plot_comparison
    from fusion_bench_featcal.results.figures import plot_run
    from fusion_bench_featcal.results.find import find

    found = find(options.runs)
    places = [*found.runs, *found.comparisons]
    for place, folder in zip(places, _figure_folders(places, options.out), strict=True):
        draw = plot_comparison if place in found.comparisons else plot_run
        for path in draw(place, folder):
            print(path)
    return 0


def preflight_command(options: argparse.Namespace) -> int:
    """Say what a calibration will meet, from a model's configuration alone: no weights needed."""
    from fusion_bench_featcal.plan.estimate import Request
    from fusion_bench_featcal.preflight import describe, empty_model
    from fusion_bench_featcal.settings import FeatCalSettings

    lengths = {"length": options.length, "target_length": options.target_length}
    try:
        if any("=" in word for word in options.words):
            from fusion_bench_featcal.fusionbench.plan_run import preflight_request

            request = preflight_request(options.words, **lengths)
        else:
            lengths["length"] = options.length or 512
            model = empty_model(options.words[0])
            request = Request(model, FeatCalSettings(), options.tasks, **lengths)
        print(describe(request))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def plan_command(options: argparse.Namespace) -> int:
    """Estimate time, memory, bytes read and files of a calibration before anything is loaded."""
    import json

    from fusion_bench_featcal.fusionbench.plan_run import run_request
    from fusion_bench_featcal.plan.estimate import estimate, with_levers
    from fusion_bench_featcal.plan.show import show_plan
    from fusion_bench_featcal.settings import CalibrationError

    lengths = {"length": options.length, "target_length": options.target_length}
    if options.rates is not None:
        print("featcal: --rates has no effect any more: the probe is short", file=sys.stderr)
    try:
        request = run_request(options.words, device=options.device, **lengths)
        plan = with_levers(request, estimate(request))
    # torch says by an assertion that it was built without the device
    except (ValueError, CalibrationError, RuntimeError, AssertionError) as error:
        raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(plan.as_dict(), indent=1))
    else:
        show_plan(plan)
    return 0


def settings_command(options: argparse.Namespace) -> int:
    """List the settings of a method: defaults, accepted values and meaning."""
    import json
    from dataclasses import asdict

    from fusion_bench_featcal.nearest_names import nearest_hint
    from fusion_bench_featcal.setting_docs import METHODS, other_methods, settings_text

    names = {name.rpartition("/")[2]: name for name in METHODS} | {name: name for name in METHODS}
    if options.method not in names:
        hint = nearest_hint(options.method, names)
        raise UsageError(f"no method {options.method!r}{hint}; there are {', '.join(METHODS)}")
    method = names[options.method]
    settings = METHODS[method]()
    if options.json:
        print(json.dumps([asdict(setting) for setting in settings], indent=1))
    else:
        print(settings_text(method, settings))
        print(f"\n{other_methods()}")
    return 0


def suite_build_command(options: argparse.Namespace) -> int:
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
    try:
        folder = build(options.out, options.suite, options.seed, tasks=options.task)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"built: {folder}")
    return 0


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


def suite_path_command(options: argparse.Namespace) -> int:
    """Print where the bundled suites, or one file or folder of them, lie."""
    from fusion_bench_featcal.suites.paths import suite_path

    try:
        print(suite_path(options.name))
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _figure_folders(runs: Sequence[Path], out: str | None) -> list[Path | None]:
    """One folder per run below `out`, named by what tells the runs apart."""
    if out is None:
        return [None] * len(runs)
    if len(runs) == 1:
        return [Path(out)]
    places = [run.resolve() for run in runs]
    shared = os.path.commonpath(places)
    return [Path(out) / place.relative_to(shared) for place in places]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="featcal",
        description="Tables and figures of calibration runs, and the bundled suites. "
        "Runs themselves start with: fusion_bench method=featcal modelpool=...; their settings: "
        "featcal settings",
    )
    parser.add_argument("--version", action="version", version=f"featcal {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    report = _command(commands, "report", report_command)
    report.add_argument("runs", nargs="+", metavar="RUN", help=_RUN_HELP)
    report.add_argument("--out", metavar="DIR", help="also write report.{json,csv,md} there")
    plot = _command(commands, "plot", plot_command)
    plot.add_argument("runs", nargs="+", metavar="RUN", help=_RUN_HELP)
    plot.add_argument("--out", metavar="DIR", help="folder for the figures (default: the run's)")
    preflight = _command(commands, "preflight", preflight_command)
    preflight.add_argument(
        "words",
        nargs="+",
        metavar="WORD",
        help="words of a run (modelpool=flan-t5-base_glue method=featcal/paper_flan_t5), or a "
        "configuration: a folder, a hub id, flan-t5-base",
    )
    preflight.add_argument("--tasks", type=int, default=8, help="tasks, without a pool (8)")
    preflight.add_argument("--length", type=int, help="tokens a sample (max_length, else 512)")
    preflight.add_argument("--target-length", type=int, default=8, help="tokens a target (8)")
    plan = _command(commands, "plan", plan_command)
    plan.add_argument(
        "words", nargs="+", metavar="WORD", help="words of a run: modelpool=... method=featcal ..."
    )
    plan.add_argument("--length", type=int, help="tokens a text (max_length, else 512)")
    plan.add_argument("--target-length", type=int, default=8, help="tokens a target (8)")
    plan.add_argument("--device", default="cpu", help="where to calibrate: cpu (default), cuda")
    plan.add_argument(
        "--rates", metavar="FILE", help="no effect any more: the machine is probed each time"
    )
    plan.add_argument("--json", action="store_true", help="print everything as JSON")
    settings = _command(commands, "settings", settings_command)
    settings.add_argument(
        "method", nargs="?", default="featcal", metavar="METHOD", help="default: featcal"
    )
    settings.add_argument("--json", action="store_true", help="print them as JSON")
    suite = commands.add_parser("suite", help="build, check or locate the bundled suites")
    _add_suite_commands(suite.add_subparsers(title="commands", required=True, metavar="COMMAND"))
    return parser


def _add_suite_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    build = _command(commands, "build", suite_build_command)
    build.add_argument("--out", metavar="DIR", required=True, help="a new folder for the build")
    build.add_argument(
        "--suite",
        choices=("clip-vit-mini", "flan-t5-mini", "llama-mini"),
        default="clip-vit-mini",
        help="the suite to build (default: clip-vit-mini)",
    )
    build.add_argument("--seed", type=int, default=0, help="seed of the training (default: 0)")
    build.add_argument(
        "--task", action="append", metavar="NAME", help="build this task only (repeatable)"
    )
    check = _command(commands, "check", suite_check_command)
    check.add_argument("folder", nargs="?", metavar="DIR", help="default: the bundled suites")
    path = _command(commands, "path", suite_path_command)
    path.add_argument("name", nargs="?", default="", metavar="NAME", help="default: all suites")


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, run: "object"
) -> argparse.ArgumentParser:
    help_text = (run.__doc__ or "").strip()
    parser = commands.add_parser(name, help=help_text, description=help_text)
    parser.set_defaults(command=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
