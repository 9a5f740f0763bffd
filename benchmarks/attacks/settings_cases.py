"""Attacks by settings, families, the caller's precision and hostile checkpoints."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from calibrations import distance, run_fast, run_slow
from fusion_bench import BaseModelPool
from oracle import Knobs
from safetensors.torch import load_file
from tiny_images import picture
from tiny_models import clip_suite, residual_suite

from attacks.judging import (
    REFUSED,
    RIGHT,
    case,
    expect,
)
from attacks.worlds import World
from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.json_files import sealed_json

# --- settings ---


@case("settings: ridge_lambda=1e300", "ridge_lambda", must=REFUSED, never=("raise",))
def _(folder: Path) -> None:
    run_fast(clip_suite(tasks=2).to(torch.float32), ridge_lambda=1e300)


@case("settings: anchor_rho=1e30", "anchor_rho", must=REFUSED, never=("calibration data",))
def _(folder: Path) -> None:
    run_fast(clip_suite(tasks=2).to(torch.float32), anchor_rho=1e30)


for _setting in ("activations_dir", "checkpoint_dir", "cache_dir"):

    @case(f"settings: {_setting} is a file", _setting, must=REFUSED)
    def _(folder: Path, setting: str = _setting) -> None:
        world = World(folder)
        (folder / "taken").touch()
        ran = folder / "ran"
        recorder = {"_target_": "attacks.parts.Recorder", "path": str(ran)}
        try:
            world.run(base_method=recorder, activations="disk", **{setting: str(folder / "taken")})
        finally:
            expect(not ran.exists(), "found out after the merger ran")


@case("settings: a read budget counts all reads", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    models = world.modelpool["models"]
    models["_merged_"] = models["_pretrained_"]
    pool = world.pool()
    size = sum(t.nbytes for t in load_file(world.weights("one")).values())
    read = [0]
    tensor, load = SafetensorsExpert.tensor, pool.load_model

    def counted(self: SafetensorsExpert, name: str) -> Any:
        found = tensor(self, name)
        mine = any(self._files[name] == world.weights(task) for task in ("one", "two"))
        read[0] += found.nbytes if mine else 0
        return found

    def loaded(name: Any, *rest: Any, **more: Any) -> Any:
        read[0] += size if name in ("one", "two") else 0
        return load(name, *rest, **more)

    pool.load_model = loaded
    SafetensorsExpert.tensor = counted  # type: ignore[method-assign]
    try:
        budget = size // 2
        FeatCalAlgorithm(samples_per_task=4, decode_workers=0, expert_read_budget=budget).run(pool)
    finally:
        SafetensorsExpert.tensor = tensor  # type: ignore[method-assign]
    expect(0 < read[0] <= budget, f"read {read[0]} bytes, not {budget}")


# --- families ---


@case("families: one that auto does not know, before the merger runs", "family", "replay",
      must=REFUSED)  # fmt: skip
def _(folder: Path) -> None:
    suite = residual_suite()
    models: Any = {"_pretrained_": suite.base, **suite.experts}
    for model in models.values():
        model.others = copy.deepcopy(model.layers)  # another list, as large
    pool: Any = BaseModelPool(models)
    pool._train_datasets = {task: {} for task in suite.experts}
    pool.load_train_dataset = lambda task: [{"image": picture(n)} for n in range(8)]
    pool._processor = lambda image: torch.zeros(4)
    pool.load_processor = lambda: pool._processor
    ran = folder / "ran"
    recorder = {"_target_": "attacks.parts.Recorder", "path": str(ran)}
    try:
        FeatCalAlgorithm(base_method=recorder, samples_per_task=4).run(pool)
    finally:
        expect(not ran.exists(), "refused after the merger ran")


# --- precision of the caller ---


def _with_tf32(suite: Any, folder: Path) -> Any:
    """Calibrate as in a program that asked for TF32; whether that is still asked for after."""
    found = run_fast(suite, checkpoint_dir=str(folder / "kept")).model
    return found, torch.backends.fp32_precision  # type: ignore[attr-defined]


@case("precision: the caller has set torch.backends.fp32_precision to tf32", must=RIGHT)
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2).to(torch.float32)
    wanted = run_fast(suite).model
    before = torch.backends.fp32_precision  # type: ignore[attr-defined]
    torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
    try:
        found, after = _with_tf32(suite, folder)
    finally:
        torch.backends.fp32_precision = before  # type: ignore[attr-defined]
    expect(after == "tf32", "the caller's setting was changed")
    expect(distance(found, wanted) == 0, "another result")


@case("precision: the caller has set the products' fp32_precision to tf32", must=RIGHT)
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2).to(torch.float32)
    wanted = run_fast(suite).model
    products: Any = torch.backends.cuda.matmul
    before = products.fp32_precision
    products.fp32_precision = "tf32"
    try:
        found, _ = _with_tf32(suite, folder)
        after = products.fp32_precision
    finally:
        products.fp32_precision = before
    expect(after == "tf32", "the caller's setting was changed")
    expect(distance(found, wanted) == 0, "another result")


for _precision, _dtype in (("16-true", torch.float16), ("bf16-true", torch.bfloat16),
                           ("64-true", torch.float64)):  # fmt: skip

    @case(f"precision: fabric.precision={_precision}", r"fabric\.precision")
    def _(folder: Path, precision: str = _precision, dtype: torch.dtype = _dtype) -> None:
        world = World(folder)
        words = (f"fabric.precision={precision}", f"merged_model_save_path={folder}/saved")
        world.command(*words).succeeded()
        saved = load_file(folder / "saved" / "model.safetensors")
        kinds = {tensor.dtype for tensor in saved.values()}
        expect(kinds == {dtype}, f"it has no effect: saved {kinds}")

# --- checkpoints that mean harm ---


def _nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def _with_entry(**changes: Any) -> Callable[[Any], str]:
    """Return a change of the last block's entry; None: that part goes."""

    def change(content: Any) -> str:
        block, entry = content["blocks"].popitem()
        entry = {key: value for key, value in (entry | changes).items() if value is not None}
        return sealed_json({**content, "blocks": content["blocks"] | {block: entry}})

    return change


_MANIFESTS: Mapping[str, Callable[[Any], str]] = {
    "nothing in it": lambda content: sealed_json({}),
    "numbers in place of parts": lambda content: sealed_json(dict.fromkeys(content, 5)),
    "lists in place of parts": lambda content: sealed_json({key: [1] for key in content}),
    "deep nesting": lambda content: _nested(100_000),
    "no JSON object": lambda content: "17",
    "a block without records": _with_entry(records=None),
    "a number for a digest": _with_entry(digest=5),
    "another digest": _with_entry(digest="00"),
    "records of another form": _with_entry(records=7),
}

for _name, _change in _MANIFESTS.items():

    @case(f"checkpoints: blocks.json with {_name}", "block", "checkpoint_dir", must=REFUSED)
    def _(folder: Path, change: Callable[[Any], str] = _change) -> None:
        suite, place = clip_suite(tasks=2), folder / "kept"
        run_fast(suite, checkpoint_dir=str(place))
        content = json.loads((place / "blocks.json").read_text())
        del content["digest"]
        (place / "blocks.json").write_text(change(content))
        run_fast(suite, checkpoint_dir=str(place), resume=True)


@case("settings: rho, lambda and alpha at their edges stay right", must=RIGHT)
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2)
    for knobs in (Knobs(lam=1e8, eps=1e-8), Knobs(rho=-3, eps=1e-8), Knobs(alpha=1, eps=1e-8)):
        gap = distance(run_fast(suite, knobs).model, run_slow(suite, knobs).model)
        expect(gap < 1e-9, f"{knobs}: off by {gap:.0e}")


@case("settings: calibrate without experts' data", "task_1", must=REFUSED)
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2)
    settings = FeatCalSettings(samples_per_task=7)
    inputs = {"task_0": suite.inputs["task_0"]}
    calibrate(suite.merged, suite.base, suite.experts, inputs, settings, progress=False)
