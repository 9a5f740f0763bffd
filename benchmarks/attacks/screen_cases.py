"""Attacks on what is shown: the normal run, tables, names of settings, pages."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch
from composing import compose_here
from safetensors.torch import load_file, save_file
from synthetic import make_report

from attacks.files import shown
from attacks.judging import RIGHT, WIDTH, case, expect
from attacks.paths import REPOSITORY
from attacks.worlds import FEW, TASKS, Screen, World, run_command
from fusion_bench_featcal import FeatCalSettings

# --- the normal run ---


def _table_starts(screen: Screen) -> int:
    starts = [n for n, line in enumerate(screen.lines) if "accuracy, %" in line]
    expect(starts, "no table")
    return starts[0]


def _too_wide(lines: list[str]) -> list[str]:
    """Lines wider than the screen, but for paths and commands, which cannot be broken."""
    return [line for line in lines if len(line.rstrip()) > WIDTH and not re.search("[/=]", line)]


def _check_normal(screen: Screen, folder: Path) -> None:
    screen.succeeded()
    before, lines = _table_starts(screen), screen.lines
    expect(before <= 62, f"{before} lines before the table")
    bars = sum("\r" in line or "it/s]" in line for line in screen.text.split("\n"))
    expect(not bars, f"{bars} lines of progress bars in a pipe")
    wide = _too_wide(lines[before - 2 :])
    expect(not wide, f"{len(wide)} lines wider than {WIDTH} columns: {wide[:1]}")
    expect("Skipping" not in screen.text, "FusionBench says that something is skipped")
    tail = "\n".join(lines[-8:])
    expect(re.search("featcal|fusion_bench|load", tail), f"no word of what to type next: {tail}")
    expect("report" in tail, f"no word of where everything is: {tail}")


@case("screen: a normal run", must=RIGHT)
def _(folder: Path) -> None:
    _check_normal(World(folder).command(), folder)


@case("screen: references are evaluated after the calibration", must=RIGHT)
def _(folder: Path) -> None:
    world, trace = World(folder), folder / "trace"
    for task in TASKS:
        for split in ("train", "test"):
            data = {
                "_target_": "attacks.parts.TracingImages",
                "path": str(world.data(task, split)),
                "trace": str(trace),
                "name": split,
            }
            if split == "train":
                world.modelpool["train_datasets"][task] = data
            else:
                world.modelpool["default_taskpool"]["tasks"][task]["data"] = data
    world.command("method.compare_with=[base,experts,merged]").succeeded()
    order = trace.read_text().split()
    expect(set(order) == {"train", "test"}, f"read {set(order)}")
    expect(order[0] == "train", "test pictures were read before those of the calibration")


@case("screen: a normal run that saves", must=RIGHT)
def _(folder: Path) -> None:
    screen = World(folder).command(f"merged_model_save_path={folder}/saved")
    _check_normal(screen, folder)
    tail = " ".join(screen.lines[-8:])
    expect("saved" in tail and re.search(r"\bfeatcal\b", tail), f"not told which row: {tail}")


@case("screen: a comparison", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    screen = world.command("method=compare", "method.upstreams=[task_arithmetic]",
                           "method.alone=[]", "method.post_merging=[anchor_only,featcal]",
                           FEW)  # fmt: skip
    screen.succeeded()
    expect("Skipping" not in screen.text, "FusionBench says that something is skipped")
    before = _table_starts(screen)
    expect(before <= 62, f"{before} lines before the table")
    wide = _too_wide(screen.lines[before - 2 :])
    expect(not wide, f"{len(wide)} lines wider than {WIDTH} columns: {wide[:1]}")


@case("screen: a run of six tasks", must=RIGHT, slow=True)
def _(folder: Path) -> None:
    screen = run_command(folder, "method=featcal", "modelpool=clip-vit-mini_TA6",
                         "method.samples_per_task=16")  # fmt: skip
    _check_normal(screen, folder)
    expect(_table_starts(screen) <= 60, "more than 60 lines before the table")


@case("screen: losses are in every report", must=RIGHT)
def _(folder: Path) -> None:
    World(folder).command(f"path.log_dir={folder}/log").succeeded()
    for name in ("report.md", "report.csv", "report.json"):
        expect("loss" in (folder / "log" / name).read_text().lower(), f"{name} has no loss")


@case("screen: taskpool=dummy, asked for, evaluates nothing", must=RIGHT)
def _(folder: Path) -> None:
    screen = World(folder).command("taskpool=dummy").succeeded()
    expect("evaluating featcal" not in screen.text, "evaluated")
    expect("accuracy, %" not in screen.text, "a table of accuracies")


@case("screen: an expert far from the base gets a line", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    base = load_file(world.weights("_pretrained_"))
    for task, size in (("one", 0.02), ("two", 2.0)):
        generator = torch.Generator().manual_seed(len(task))
        moved = {
            name: tensor + size * torch.randn(tensor.shape, generator=generator)
            if tensor.is_floating_point() and tensor.ndim else tensor
            for name, tensor in base.items()
        }  # fmt: skip
        save_file(moved, world.weights(task), {"format": "pt"})
    text = " ".join(world.command().succeeded().text.split())
    expect(re.search(r"two\b.{0,80}(far|distance|away)", text),
           "no line about it")  # fmt: skip


for _number in (6, 20):

    @case(f"screen: the table of {_number} tasks fits", must=RIGHT)
    def _(folder: Path, number: int = _number) -> None:
        tasks = [f"a_rather_long_name_{n}" for n in range(number)]
        levels = {"base": 0.3, "experts": 0.9, "task_arithmetic": 0.6, "featcal": 0.75,
                  "featcal:a-preset": 0.7}  # fmt: skip
        make_report(levels, tasks).write(folder)
        with mock.patch.dict(os.environ, {"COLUMNS": str(WIDTH)}):
            text = shown("report", str(folder))
        wide = [line for line in text.splitlines() if len(line.rstrip()) > WIDTH]
        expect(not wide, f"{len(wide)} lines wider than {WIDTH}: {wide[:1]}")
        expect(all(f"{n}" in text for n in range(number)), "a task is missing")

# --- names and pages ---


@case("names: featcal settings lists every setting with its default", must=RIGHT)
def _(folder: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        from fusion_bench_featcal.cli import main

        with contextlib.suppress(SystemExit):
            main(["settings"])
    text = out.getvalue()
    missing = [name for name in FeatCalSettings.names() if name not in text]
    expect(not missing, f"{len(missing)} settings are missing: {err.getvalue()[-80:]}")
    expect("0.05" in text and "256" in text, "no defaults")


for _name in ("compare", "surgery", "prob_surgery", "featcal_baselines/surgery_v2"):

    @case(f"names: steps is what {_name} calls its updates", must=RIGHT)
    def _(folder: Path, name: str = _name) -> None:
        config = compose_here(f"method={name}", "modelpool=clip-vit-mini_TA6", "method.steps=7")
        method = config.method
        found = method.post_merging_methods.surgery.steps if name == "compare" else method.steps
        expect(found == 7, f"it has no effect: {found}")


def commands(page: str) -> list[list[str]]:
    """Words of every `fusion_bench` command on a page that stands there whole."""
    text = re.sub(r"\\\n\s*", " ", page)
    found = re.findall(r"(?:^|[`\s/])fusion_bench ([^`\n]*)", text)
    words = [shlex.split(line.split(" #")[0].split(";")[0].split("&&")[0]) for line in found]
    return [line for line in words if any(word.startswith("modelpool=") for word in line)]


_PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
for _page in _PAGES:

    @case(f"pages: commands of {_page.name} compose", must=RIGHT)
    def _(folder: Path, page: Path = _page) -> None:
        failed = []
        for words in commands(page.read_text()):
            own = any("my_" in word or "..." in word or "$" in word for word in words)
            if own or any(word.startswith("--") for word in words):
                continue
            try:
                compose_here(*words)
            except Exception as error:
                failed.append(f"{' '.join(words)}: {str(error).splitlines()[0]}")
        expect(not failed, f"{len(failed)}: {failed[:1]}")

# --- the process' environment ---

_WAITING = """import os
from fusion_bench_featcal.cli import main
try:
    main(["suite", "path"])
except SystemExit:
    pass
print(os.environ.get("OMP_WAIT_POLICY"))
"""
for _given, _wanted in ((None, "passive"), ("active", "active")):

    @case(f"environment: OMP_WAIT_POLICY is {_wanted} where the user set {_given}", must=RIGHT)
    def _(folder: Path, given: str | None = _given, wanted: str = _wanted) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        environment |= {} if given is None else {"OMP_WAIT_POLICY": given}
        done = subprocess.run([sys.executable, "-c", _WAITING], env=environment, text=True,
                              capture_output=True, check=False)  # fmt: skip
        found = done.stdout.strip().splitlines()[-1:]
        expect([line.lower() for line in found] == [wanted], f"it is {found}")


@case("environment: the Makefile sets OMP_WAIT_POLICY", must=RIGHT)
def _(folder: Path) -> None:
    text = (REPOSITORY / "Makefile").read_text()
    expect(re.search(r"OMP_WAIT_POLICY", text), "it does not")


@case("environment: a run's own JSON can be read again", must=RIGHT)
def _(folder: Path) -> None:
    make_report().write(folder)
    json.loads((folder / "report.json").read_text())
    expect("featcal" in shown("report", str(folder)), "no row of featcal")
