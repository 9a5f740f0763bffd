"""Methods run on the bundled suites, and the models that they save."""

import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusion_bench_featcal  # noqa: F401

# isort: split
from configs import as_job, composed
from fusion_bench.utils import instantiate
from omegaconf import OmegaConf
from safetensors.torch import load_file
from torch import Tensor

CLIP, T5, LLAMA = "clip-vit-mini_alphabets2", "flan-t5-mini_TA6", "llama-mini_TA6"


class Golden(NamedTuple):
    """A method, a pool, words of the command for the method, and if its test is slow."""

    method: str
    pool: str
    words: tuple[str, ...]
    slow: bool = True


FEW = ("samples_per_task=8",)
ALONE = (*FEW, "presets={}")
TRAINED = (*FEW, "steps=5", "batch_size=4")
PRESETS = "presets={mini: {ridge_lambda: 1e-4, mix_alpha: 0.3, anchor_rho: 1.0}}"
GENERATED = ("calibration_targets=generated", "generated_tokens=3", "max_length=16")
RUNS: dict[str, Golden] = {
    "featcal": Golden("featcal", CLIP, ALONE),
    "featcal, preset": Golden("featcal", CLIP, (*FEW, PRESETS, "save=featcal_mini")),
    "featcal, t5": Golden("featcal", T5, ("samples_per_task=4", "presets={}")),
    "featcal, t5 generated": Golden("featcal/paper_flan_t5", T5,
        ("samples_per_task=2", *GENERATED, "presets={}")),
    "featcal, llama": Golden("featcal/paper_llama_3b", LLAMA,
        ("samples_per_task=4", "presets={}", "max_length=64"), slow=False),
    "regmean": Golden("featcal_baselines/regmean", CLIP, (*FEW, "task_weights=unit_gram")),
    "regmean_plusplus": Golden("featcal_baselines/regmean_plusplus", CLIP, FEW),
    "lot": Golden("featcal_baselines/lot", CLIP, FEW),
    "ridge_surgery": Golden("ridge_surgery", CLIP, FEW, slow=False),
    "ridge_surgery, fixed": Golden("ridge_surgery", CLIP,
        (*FEW, "ridge_lambda=0.1")),
    "surgery": Golden("surgery", CLIP, TRAINED, slow=False),
    "prob_surgery": Golden("prob_surgery", CLIP, TRAINED),
    "surgery_v2": Golden("featcal_baselines/surgery_v2", CLIP, TRAINED),
}  # fmt: skip
EVALUATED = "featcal, preset"
"""The run whose models are evaluated, which test_algorithm.py compares."""
BOUND = 2e-4
PROJECTIONS = 4

Sketch = dict[str, list[float]]
"""Changed parameter -> norm of the change, and its products with four random directions."""


def stable_name(name: str) -> str:
    """Name of a parameter whatever the release: transformers 5.6 dropped this prefix of CLIP's."""
    return name.removeprefix("vision_model.")


def sketch(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Sketch:
    """Describe the change of every parameter that changed. New parameters count from zero."""
    changes = {}
    for name, value in sorted(after.items()):
        change = value.double() - (before[name].double() if name in before else 0)
        if bool(change.any()):
            # normal numbers that depend on the name alone: drawn in float64, which has one draw
            numbers = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            shape = (PROJECTIONS, *change.shape)
            directions = torch.randn(shape, generator=numbers, dtype=torch.float64).float()
            products = (directions.double() * change).flatten(1).sum(1)
            changes[name] = [float(f"{n:.6g}") for n in (change.norm(), *products)]
    return changes


def differences(result: Sketch, golden: Sketch) -> list[str]:
    """Parameters that are further apart than BOUND times the norm of the golden change."""
    gaps = {}
    for name in golden.keys() & result.keys():
        pairs = zip(result[name], golden[name], strict=True)
        gaps[name] = max(abs(a - b) for a, b in pairs) / golden[name][0]
    wrong = [f"{name}: {gap:.1e} of its norm" for name, gap in gaps.items() if gap > BOUND]
    return wrong + [f"{name}: in one only" for name in sorted(result.keys() ^ golden.keys())]


@cache
def _base(pool: str) -> dict[str, Any]:
    base = composed(f"modelpool={pool}").modelpool.models["_pretrained_"]
    return saved_tensors(
        Path(base if isinstance(base, str) else base.pretrained_model_name_or_path)
    )


def saved_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a saved model, corrections included."""
    files = sorted(folder.glob("*.safetensors"))
    return {stable_name(name): t for file in files for name, t in load_file(file).items()}


def run_method(name: str, folder: Path, *words: str) -> None:
    """Run one of RUNS, with its logs in the folder's `log` and the model in `saved`."""
    golden = RUNS[name]
    command = [f"method={golden.method}", f"modelpool={golden.pool}", "fabric/loggers=csv_logger"]
    command += [f"method.{word}" for word in golden.words]
    command += [] if name == EVALUATED else ["~modelpool.default_taskpool"]
    command += [f"merged_model_save_path={folder}/saved", *words]
    with as_job(folder / "log", *command) as config:
        OmegaConf.resolve(config)
        instantiate(config).run()


def sketch_of_run(name: str, folder: Path) -> Sketch:
    """Describe how the model that a run saved differs from the base of its suite."""
    return sketch(_base(RUNS[name].pool), saved_tensors(folder / "saved"))


def method_sketch(name: str, folder: Path) -> Sketch:
    """Run a method on a suite and describe the model."""
    run_method(name, folder)
    return sketch_of_run(name, folder)
