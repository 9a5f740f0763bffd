"""Attacks on results that are kept: comparisons, their folder, reports and stored heads."""

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from comparison_parts import FakeProgram
from composing import compose_here
from hydra.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from tiny_images import picture

from attacks.files import shown, without_figures
from attacks.judging import RIGHT, captured_log, case, expect
from attacks.worlds import ARITHMETIC, World, forked
from fusion_bench_featcal.comparison import ComparisonAlgorithm
from fusion_bench_featcal.comparison.grid import make_grid
from fusion_bench_featcal.files import owner_mark
from fusion_bench_featcal.fusionbench.options import plain
from fusion_bench_featcal.results import Report
from fusion_bench_featcal.results.published import _averages
from fusion_bench_featcal.results.summary import summarise
from fusion_bench_featcal.results.views import show_side_by_side
from fusion_bench_featcal.tasks.heads import forget_stored_heads

_CELLS = {
    "featcal": {
        "_target_": "fusion_bench_featcal.comparison.FeatCal",
        "samples_per_task": 4,
        "decode_workers": 0,
    },
    "numbered": {"_target_": "attacks.parts.Numbered"},
    "featcal+numbered": ["featcal", "numbered"],
}


def numbers(world: World, results: str, cells: Mapping[str, Any] | None = None) -> tuple[Any, list]:
    """Run a comparison in a process of its own; its log, and numbers that identify its weights.

    Numbers are those of every row's accuracy and of the weights that reached `numbered`.
    """

    def work() -> tuple[Any, list[str]]:
        chosen: Any = cells or _CELLS
        last = list(chosen)[-1]
        folder = world.folder / results
        method = ComparisonAlgorithm(
            upstream_mergers={"task_arithmetic": ARITHMETIC},
            post_merging_methods=chosen, post_merging=[last], alone=[], results_dir=str(folder),
        )  # fmt: skip
        config = OmegaConf.create(world.modelpool["default_taskpool"])
        program: Any = FakeProgram(instantiate(config))
        method._program = program
        with (
            open(os.devnull, "w") as nowhere,
            contextlib.redirect_stdout(nowhere),
            captured_log() as messages,
            without_figures(),
        ):
            method.run(world.pool())
        rows = json.loads((folder / "report.json").read_text())["rows"]
        told = {row["name"]: [row["accuracy"], row["cost"].get("parameters_added")] for row in rows}
        return told, messages

    return forked(work)


def _changed(
    name: str, change: Callable[[World], object], cells: Mapping[str, Any] | None = None
) -> None:
    """Register a case: after a change, kept results equal those of a folder without any."""

    @case(f"compare: {name}", must=RIGHT)
    def _(folder: Path) -> None:
        world = World(folder)
        own = None if cells is None else dict(cells)
        if own is not None:
            (folder / "attack_own.py").write_text(_OWN.format(factor=2.0))
            sys.path.insert(0, str(folder))
        try:
            before, _ = numbers(world, "kept", own)
            change(world)
            found, _ = numbers(world, "kept", own)
            wanted, _ = numbers(world, "fresh", own)
        finally:
            if own is not None:
                sys.path.remove(str(folder))
        expect(before != wanted, "the change has no effect: the case proves nothing")
        expect(found == wanted, "what was finished before the change was taken for the result")


def _keeping_time(path: Path, write: Callable[[], object]) -> None:
    """Change a file so that its size and time stay."""
    status = path.stat()
    write()
    expect(path.stat().st_size == status.st_size, "the case must not change the size")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _other_weights(world: World) -> None:
    path = world.weights("one")
    tensors = {name: 0.5 * tensor for name, tensor in load_file(path).items()}
    _keeping_time(path, lambda: save_file(tensors, path, {"format": "pt"}))


def _other_pictures(world: World) -> None:
    for number, path in enumerate(sorted(world.data("one", "train").rglob("*.png"))):
        picture(7000 + number).save(path)


def _other_test_pictures(world: World) -> None:
    first, second, third = sorted(world.data("one", "test").iterdir())
    for old, new in ((first, "x"), (second, first.name), (third, second.name)):
        old.rename(old.with_name(new))
    first.with_name("x").rename(third)


_OWN = """from comparison_parts import Scale
import torch
from attacks.parts import number_of


class Mine(Scale):
    def post_merge(self, merged, inputs):
        with torch.no_grad():
            for parameter in merged.parameters():
                parameter.mul_({factor})
        self.number = number_of(merged)
        return merged

    def added(self, model):
        return {{"weights": self.number}}
"""


def _other_code(world: World) -> None:
    path = world.folder / "attack_own.py"
    _keeping_time(path, lambda: path.write_text(_OWN.format(factor=3.0)))
    shutil.rmtree(world.folder / "__pycache__", ignore_errors=True)


_changed("weights change, size and time stay", _other_weights)
_changed("calibration pictures change", _other_pictures)
_changed("test pictures change", _other_test_pictures)
_changed("the source of a user's own method changes", _other_code,
         {"mine": {"_target_": "attack_own.Mine"}})  # fmt: skip


def _in_results(name: str, pattern: str, change: Callable[[Path], object], says: str) -> None:
    """Register a case: damage in `results_dir`, then the same results and a line in the log."""

    @case(f"compare: {name}", must=RIGHT)
    def _(folder: Path) -> None:
        world = World(folder)
        before, _ = numbers(world, "kept")
        for cell in (folder / "kept" / "cells").glob("*numbered*"):
            if "upstreams" in pattern:
                shutil.rmtree(cell)  # so that the merged model is read again
        paths = sorted((folder / "kept").glob(pattern))
        expect(paths, f"nothing matches {pattern}")
        for path in paths:
            change(path)
        found, messages = numbers(world, "kept")
        expect(found == before, "other results")
        if says:
            expect(any(says in text for text in messages), f"no line of the log says {says}")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 4] ^= 1
    path.write_bytes(data)


for _name in ("cells/*numbered*/items.npz", "cells/*numbered*/result.json"):
    _in_results(f"one bit of {_name} flips", _name, _flip, "cells")
for _name in ("model.safetensors", "cost.json"):
    _in_results(f"one bit of upstreams/{_name} flips", f"upstreams/*/{_name}", _flip, "upstreams")
    _in_results(f"upstreams/{_name} is cut", f"upstreams/*/{_name}",
                lambda path: path.write_bytes(path.read_bytes()[:20]), "upstreams")  # fmt: skip
    _in_results(
        f"upstreams/{_name} is gone", f"upstreams/*/{_name}", lambda path: path.unlink(), ""
    )
    _in_results(f"upstreams/{_name} is a folder", f"upstreams/*/{_name}",
                lambda path: (path.unlink(), path.mkdir()), "upstreams")  # fmt: skip


@case("compare: leftovers of killed processes are swept", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    numbers(world, "kept")
    places = [path for path in (folder / "kept").glob("*/*") if path.is_dir()]
    for place in places:
        if place.parent.name in ("cells", "upstreams"):
            host = owner_mark().removesuffix(f"-{os.getpid()}")
            (place / f".model.safetensors.{host}-999999-0.part").write_bytes(b"half")
            (place / f".result.json.{host}-999999-1.part").write_bytes(b"half")
    numbers(world, "kept")
    left = [path.name for path in (folder / "kept").rglob("*.part")]
    expect(not left, f"{len(left)} leftovers: {left[:3]}")


# --- the paper's settings and numbers ---

_PRESETS = {
    "flan-t5-base_glue": {"ridge_lambda": 1e-5, "anchor_rho": 2.0, "mix_alpha": 0.6},
    "flan-t5-large_glue_lora": {"ridge_lambda": 1e-5, "anchor_rho": 2.0, "mix_alpha": 0.6},
    "mergebench_llama-3.2-3b-instruct":
        {"ridge_lambda": 1e-5, "anchor_rho": 0.5, "mix_alpha": 0.15},
    "mergebench_llama-3.1-8b-instruct":
        {"ridge_lambda": 3.0, "anchor_rho": 0.5, "mix_alpha": 0.15},
    "clip-vit-base-patch32_TA8": {"ridge_lambda": 0.05, "anchor_rho": 2.0, "mix_alpha": 0.3},
}  # fmt: skip
for _suite, _wanted in _PRESETS.items():

    @case(f"compare: a cell has the paper's settings on {_suite}", must=RIGHT)
    def _(folder: Path, suite: str = _suite, wanted: dict[str, float] = _wanted) -> None:
        config = compose_here("method=compare", f"modelpool={suite}")
        algorithm = instantiate(config.method, _recursive_=False)
        keys: Any = plain(config.modelpool.get("featcal")) or {}
        grid = make_grid(algorithm.choices, keys)
        every = {n: c.settings for n, c in grid.cells.items() if n.split(":")[0] == "featcal"}
        found = {name: {key: own[key] for key in wanted} for name, own in every.items()}
        expect(wanted in found.values(), f"runs {found}")


def _comparison_text(folder: Path, settings: Mapping[str, Any], samples: int) -> str:
    suite, upstream = "clip-vit-base-patch32_TA8", "task_arithmetic"
    report = Report(suite=suite, upstream=upstream)
    tasks = tuple(f"task_{number}" for number in range(8))
    for name, level in {"base": 0.2, "experts": 0.9, upstream: 0.5, "featcal": 0.7}.items():
        own = name == "featcal"
        drawn = {task: {"samples": samples, "split": "train"} for task in tasks}
        report.add_row(
            name, dict.fromkeys(tasks, level), samples=drawn if own else None,
            settings=dict(settings, samples_per_task=samples) if own else None,
        )  # fmt: skip
    report.write(folder / upstream)
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        show_side_by_side(summarise([folder / upstream]))
    return text.getvalue()


@case("compare: a published number only beside its own settings and samples", must=RIGHT)
def _(folder: Path) -> None:
    from fusion_bench_featcal import FeatCalSettings

    value = _averages()["clip-vit-base-patch32_TA8", "task_arithmetic", "featcal"].value
    number, paper = f"{100 * value:.1f}", FeatCalSettings().of_the_model().as_dict()
    expect(number in _comparison_text(folder / "a", paper, 256), "missing where it belongs")
    expect(number not in _comparison_text(folder / "b", paper, 8), "shown beside 8 samples")
    other = paper | {"mix_alpha": 0.9}
    expect(number not in _comparison_text(folder / "c", other, 256), "shown beside alpha 0.9")


# --- stored heads and reports ---

_NOTES = {
    "half of its metadata": '{"duration": 1, "input_args": {"ta',
    "metadata of another form": '[1, "construct"]',
    "metadata without arguments": '{"duration": 1.0}',
    "empty metadata": "",
    "metadata that is no text": "\udcff\udcfe",
}
for _name, _text in _NOTES.items():

    @case(f"heads: a stored head with {_name}", must=RIGHT)
    def _(folder: Path, text: str = _text) -> None:
        heads = folder / "construct_classification_head"
        for name in ("damaged", "mine"):
            (heads / name).mkdir(parents=True)
        (heads / "damaged" / "metadata.json").write_bytes(text.encode(errors="surrogateescape"))
        (heads / "mine" / "metadata.json").write_text('{"input_args": {"task": "\'mine\'"}}')
        forget_stored_heads(["mine"], folder)
        expect(not (heads / "mine").exists(), "the stale head is still there")
        expect(not (heads / "damaged").exists(), "a head that may be stale is still there")


@case("reports: items.npz of another run", r"items\.npz|report\.json")
def _(folder: Path) -> None:
    from synthetic import make_report

    make_report().write(folder / "a")
    make_report({"base": 0.2, "experts": 0.8, "task_arithmetic": 0.5, "featcal": 0.6}).write(
        folder / "b"
    )
    shutil.copy(folder / "b" / "items.npz", folder / "a" / "items.npz")
    shown("report", str(folder / "a"))
    expect(False, "shown with the items of another run")


@case("reports: notes of two mergers, and a run as one table", must=RIGHT)
def _(folder: Path) -> None:
    from synthetic import make_report

    note = "dtd ends below the merged model: featcal -1.0 points"
    for merger in ("ties", "wudi"):
        levels = {"base": 0.3, "experts": 0.9, merger: 0.5, "featcal": 0.7}
        notes = [note] if merger == "ties" else []
        make_report(levels, upstream=merger, notes=notes).write(folder / merger)
    text = shown("report", str(folder / "ties"), str(folder / "wudi"))
    expect(f"ties: {note}" in " ".join(text.split()), "a note without its merger")
    lines = shown("report", str(folder / "ties")).splitlines()
    tables = sum(set(line.strip()) == {"─"} for line in lines)
    expect(tables == 1, f"{tables} tables of one run")
