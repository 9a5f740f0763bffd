"""Kinds of files that the package reads: how they come about, and how a user has them read."""

import contextlib
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import attacks.paths  # noqa: F401

# isort: split
import lightning  # noqa: F401 - before FusionBench
import torch
from calibrations import cast, run_fast
from comparison_parts import MERGERS, comparison, method, model_pool
from killing import digest_of
from synthetic import make_report
from test_experts_lora import write_adapter
from tiny_models import clip_suite
from tiny_pools import TASKS, tiny_pool, tiny_processor, write_models
from tiny_texts import t5_model, write
from transformers import CLIPVisionModel

from attacks.judging import ShownRefusal
from attacks.parts import Numbered, number_of
from fusion_bench_featcal import CalibrationLog, FeatCalSettings, SafetensorsExpert
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.calibration_data import calibration_batches
from fusion_bench_featcal.cli import main as featcal
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.methods.corrected_clip import CorrectedModel
from fusion_bench_featcal.methods.corrected_model import AffineModule
from fusion_bench_featcal.results.curves import write_curves
from fusion_bench_featcal.suites.checksums import write_checksums
from fusion_bench_featcal.tasks.heads import forget_stored_heads

AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Files of one kind.

    Attributes:
        name: What they are.
        weight: Share of the damages.
        make: Writes them into an empty folder.
        read: Has them read; what comes of it, comparable with `==`.
        patterns: Of the files to damage.
        core: The part of `read`'s value that must not change where damage was noticed and mended.
        is_input: Whether a user brings them, with contents that nobody can check.
        is_named: Whether a refusal must name the damaged file itself.
    """

    name: str
    weight: float
    make: Callable[[Path], object]
    read: Callable[[Path], Any]
    patterns: tuple[str, ...] = ("**/*",)
    core: Callable[[Any], Any] = field(default=lambda value: value)
    is_input: bool = False
    is_named: bool = True

    def files(self, folder: Path) -> list[Path]:
        """The files to damage."""
        paths = {path for pattern in self.patterns for path in folder.glob(pattern)}
        return sorted(path for path in paths if path.is_file())


def shown(*words: str) -> str:
    """Output of a `featcal` command.

    Raises:
        ShownRefusal: With what it prints on stderr, if it ends with another code than 0.
    """
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = featcal(words)
    if code:
        raise ShownRefusal(err.getvalue())
    return out.getvalue()


@cache
def tiny_clips() -> dict[str, str]:
    """Folders of a base, two experts and a merged model, for the life of the process."""
    return write_models(Path(tempfile.mkdtemp(prefix="featcal-attack-clips-")))


def _digest(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def _suite32() -> Any:
    suite = clip_suite(tasks=2).to(torch.float32)
    suite.inputs = cast(suite.inputs, torch.float32)
    return suite


def _resume(folder: Path) -> str:
    return digest_of(run_fast(_suite32(), checkpoint_dir=str(folder), resume=True).model)


@contextlib.contextmanager
def without_figures() -> Iterator[None]:
    """Draw no figures meanwhile, as where matplotlib is not installed."""
    # `patch.dict` would also forget what is imported meanwhile.
    present = sys.modules.pop("matplotlib", None)
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["matplotlib"]
        if present is not None:
            sys.modules["matplotlib"] = present


def _compare(folder: Path) -> list[Any]:
    """Rows of a comparison that takes what is finished from `folder`."""
    cells = {"numbered": method(Numbered) | {"_target_": "attacks.parts.Numbered"}}
    with without_figures():
        comparison(folder, post_merging=["numbered"], alone=[], post_merging_methods=cells,
                   upstream_mergers={"simple_average": MERGERS["simple_average"]}
                   ).run(model_pool())  # fmt: skip
    return json.loads((folder / "results" / "report.json").read_text())["rows"]


def _merged_models_alone(folder: Path) -> None:
    """A results folder whose merged model has to be read again for a cell that is missing."""
    _compare(folder)
    for cell in (folder / "results" / "cells").glob("*--numbered-*"):
        for path in cell.iterdir():
            path.unlink()
        cell.rmdir()


def _compare_anew(folder: Path) -> list[Any]:
    """The same where the cell is always made again: what that took is another each time."""
    rows = _compare(folder)
    for row in rows:
        if row["name"] == "numbered":
            row["cost"] = {"parameters_added": row["cost"]["parameters_added"]}
    return rows


def _without_costs(rows: list[Any]) -> Any:
    kept = ("upstream", "name", "accuracy", "gain")
    numbers = [row["cost"].get("parameters_added") for row in rows]
    return [{key: row[key] for key in kept} for row in rows], numbers


def _write_run(folder: Path) -> None:
    make_report().write(folder)
    records = [
        {"kind": "task", "block": block, "task": task, "drift_before": 0.5,
         "drift_after": 0.25, "seconds": 0.1}
        for block in ("layers.0", "layers.1") for task in ("cars", "dtd")
    ]  # fmt: skip
    CalibrationLog("clip", records).write(folder / "calibration_log.jsonl")
    write_curves(folder, {"surgery": {"cars": [(0, 2.0), (20, 1.0)], "dtd": [(0, 1.0), (20, 0.5)]}})


def _plotted(folder: Path) -> list[Any]:
    """Lines and texts of the figures that `featcal plot` would write."""
    drawn: list[Any] = []

    def keep(figures: Mapping[str, Any], *place: object) -> list[Path]:
        for axes in (axes for figure in figures.values() for axes in figure.axes):
            drawn.append([line.get_xydata().tolist() for line in axes.lines])
            drawn.append([text.get_text() for text in axes.findobj(_Text)])
        return [Path(name) for name in figures]

    modules = ("figures", "comparison_figures")
    with contextlib.ExitStack() as stack:
        for name in modules:
            stack.enter_context(
                mock.patch(f"fusion_bench_featcal.results.{name}.save_figures", keep)
            )
        shown("plot", str(folder))
    return drawn


def _Text(artist: Any) -> bool:
    return type(artist).__name__ in ("Text", "Annotation")


def _write_heads(folder: Path) -> None:
    for task in ("mine", "other"):
        head = folder / "cache" / "construct_classification_head" / task
        head.mkdir(parents=True)
        arguments = {"task": repr(task), "model_name": "'openai/clip-vit-base-patch32'"}
        (head / "metadata.json").write_text(json.dumps({"duration": 1.5, "input_args": arguments}))
        (head / "output.pkl").write_bytes(b"stale")


def _forget_heads(folder: Path) -> bool:
    """Tell whether the stale head of a task of ours is still there."""
    forget_stored_heads(["mine"], folder)
    return (folder / "cache" / "construct_classification_head" / "mine" / "output.pkl").exists()


def _cached_images(folder: Path) -> str:
    settings = FeatCalSettings(samples_per_task=3, decode_workers=0, cache_dir=str(folder / "c"))
    models = tiny_clips()
    batches = calibration_batches(tiny_pool(models), TASKS, settings, _processor())
    return _digest(*(batch["pixel_values"] for task in TASKS for batch in batches[task]))


@cache
def _processor() -> Any:
    return tiny_processor(tiny_clips())


def _write_suite(folder: Path) -> None:
    for name in ("a.txt", "b/c.txt", "b/d.bin"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode() * 5)
    write_checksums(folder)


def _write_surgery(folder: Path) -> None:
    corrections = {task: AffineModule(torch.eye(12), torch.zeros(12)) for task in TASKS}
    merged = CLIPVisionModel.from_pretrained(tiny_clips()["_merged_"])
    projection = torch.nn.Linear(16, 12, bias=False)
    curves = {task: [(0, 2.5), (20, 1.25)] for task in TASKS}
    CorrectedModel(merged, projection, corrections, curves=curves).save_pretrained(folder)


def _load_surgery(folder: Path) -> Any:
    model = CorrectedModel.from_pretrained(folder)
    return number_of(model), model.tasks, model.samples, model.curves


def _write_experts(folder: Path) -> None:
    write_models(folder)


def _calibrate_pool(folder: Path) -> int:
    names = ("_pretrained_", *TASKS)
    models = {name: str(folder / f"clip_{seed}") for seed, name in enumerate(names)}
    pool = tiny_pool(models, train=2, test=0)
    model = FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=2, decode_workers=0).run(pool)
    return number_of(model)


def _write_reads(folder: Path) -> None:
    pool = tiny_pool(tiny_clips(), train=2, test=0)
    with mock.patch.object(FeatCalAlgorithm, "log_dir", property(lambda _: str(folder))):
        FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=2, decode_workers=0).run(pool)


def _write_shards(folder: Path) -> None:
    model = CLIPVisionModel.from_pretrained(tiny_clips()["one"])
    model.save_pretrained(folder, max_shard_size="10KB")


def _write_adapter(folder: Path) -> None:
    write_adapter(folder / "adapter", t5_model().float(), 1)
    write(t5_model().float(), folder / "base")


def _all_tensors(source: Any) -> str:
    return _digest(*(source.tensor(name).float() for name in sorted(source.names())))


KINDS = [
    Kind(name="checkpoints of a calibration", weight=20,
         make=lambda folder: run_fast(_suite32(), checkpoint_dir=str(folder)), read=_resume),
    Kind(name="results_dir: finished cells", weight=2.5, make=_compare, read=_compare,
         patterns=("results/cells/**/*",), core=_without_costs),
    Kind(name="results_dir: merged models", weight=2, make=_merged_models_alone,
         read=_compare_anew,
         patterns=("results/upstreams/**/*",), core=_without_costs),
    Kind(name="report of a run, by featcal report", weight=16, make=_write_run,
         read=lambda folder: shown("report", str(folder)), patterns=("report.json", "items.npz")),
    Kind(name="reads of a run, by featcal explain", weight=3, make=_write_reads,
         read=lambda folder: shown("explain", str(folder), "--json"), patterns=("reads.json",)),
    Kind(name="logs and curves of a run, by featcal plot", weight=3, make=_write_run,
         read=_plotted, patterns=("*.jsonl",)),
    Kind(name="report of a comparison, by featcal report", weight=6, make=_compare,
         read=lambda folder: shown("report", str(folder / "results")),
         patterns=("results/report.json", "results/simple_average/report.json",
                   "results/simple_average/items.npz")),
    Kind(name="report of a comparison, by featcal plot", weight=2, make=_compare,
         read=lambda folder: _plotted(folder / "results"),
         patterns=("results/report.json", "results/simple_average/report.json")),
    Kind(name="stored zero-shot heads", weight=4, make=_write_heads, read=_forget_heads,
         patterns=("**/mine/metadata.json", "**/other/metadata.json")),
    Kind(name="cache_dir: processed images", weight=18, make=_cached_images, read=_cached_images),
    Kind(name="suite with checksums, by featcal suite check", weight=5, make=_write_suite,
         read=lambda folder: shown("suite", "check", str(folder)), is_named=False),
    Kind(name="corrected model: corrections", weight=4, make=_write_surgery, read=_load_surgery,
         patterns=("feature_corrections*",)),
    Kind(name="experts: weights and configs", weight=3, make=_write_experts, read=_calibrate_pool,
         patterns=("clip_[012]/model.safetensors", "clip_[012]/config.json"), is_input=True),
    Kind(name="experts: shards and their index", weight=2, make=_write_shards, is_input=True,
         read=lambda folder: _all_tensors(SafetensorsExpert(folder))),
    Kind(name="experts: adapters", weight=2, make=_write_adapter, is_input=True,
         read=lambda folder: _all_tensors(
             LoraExpert(SafetensorsExpert(folder / "base"), folder / "adapter")),
         patterns=("adapter/*",)),
]  # fmt: skip
