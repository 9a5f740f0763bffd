"""Methods run on the bundled suites: models that they save, and structure of a run's reports."""

import copy
import csv
import json
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

import fusion_bench_featcal  # noqa: F401

# isort: split
from fusion_bench.constants.paths import DEFAULT_CONFIG_PATH
from fusion_bench.utils import instantiate
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from safetensors.torch import load_file
from torch import Tensor

CLIP, T5, LLAMA = "clip-vit-mini_alphabets2", "flan-t5-mini_TA6", "llama-mini_TA6"
FEW = ("samples_per_task=8",)
ALONE = (*FEW, "presets={}")
TRAINED = (*FEW, "steps=5", "batch_size=4")
PRESETS = "presets={mini: {ridge_lambda: 1e-4, mix_alpha: 0.3, anchor_rho: 1.0}}"
GENERATED = ("calibration_targets=generated", "generated_tokens=3", "max_length=16")
PEER = "featcal_baselines/"
RUNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "featcal": ("featcal", CLIP, ALONE),
    "featcal, preset": ("featcal", CLIP, (*FEW, PRESETS, "save=featcal:mini")),
    "featcal, t5": ("featcal", T5, ("samples_per_task=4", "presets={}")),
    "featcal, t5 generated": ("featcal/paper_flan_t5", T5,
        ("samples_per_task=2", *GENERATED, "presets={}")),
    "featcal, llama": ("featcal/paper_llama_3b", LLAMA,
        ("samples_per_task=4", "presets={}", "max_length=64")),
    "anchor_only": (PEER + "anchor_only", CLIP, ()),
    "regmean": (PEER + "regmean", CLIP, (*FEW, "task_weights=unit_gram")),
    "regmean_plusplus": (PEER + "regmean_plusplus", CLIP, FEW),
    "lot": (PEER + "lot", CLIP, FEW),
    "ridge_surgery": ("ridge_surgery", CLIP, FEW),
    "ridge_surgery, fixed": ("ridge_surgery", CLIP, (*FEW, "ridge_lambda=0.1", "normalize=pre")),
    "surgery": ("surgery", CLIP, TRAINED),
    "prob_surgery": ("prob_surgery", CLIP, TRAINED),
    "surgery_v2": (PEER + "surgery_v2", CLIP, TRAINED),
}  # fmt: skip
SLOW = ("featcal, t5", "featcal, t5 generated", "regmean", "regmean_plusplus", "lot", "surgery_v2",
        "ridge_surgery, fixed")  # fmt: skip
EVALUATED = "featcal, preset"
"""The run whose models are evaluated, which leaves a full report."""
REPORTS = ("report.json", "lines.csv", "calibration_log.jsonl", "reads.json")
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
            products = (_directions(name, change.shape) * change).flatten(1).sum(1)
            numbers = [change.norm().item(), *products.tolist()]
            changes[name] = [float(f"{number:.6g}") for number in numbers]
    return changes


@cache
def _directions(name: str, shape: torch.Size) -> Tensor:
    """Normal numbers that depend on the name alone: drawn in float64, which has one draw."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (
        torch.randn(PROJECTIONS, *shape, generator=generator, dtype=torch.float64).float().double()
    )


def differences(result: Sketch, golden: Sketch) -> list[str]:
    """Parameters that are further apart than BOUND times the norm of the golden change."""
    gaps = {}
    for name in golden.keys() & result.keys():
        pairs = zip(result[name], golden[name], strict=True)
        gaps[name] = max(abs(a - b) for a, b in pairs) / golden[name][0]
    wrong = [f"{name}: {gap:.1e} of its norm" for name, gap in gaps.items() if gap > BOUND]
    return wrong + [f"{name}: in one only" for name in sorted(result.keys() ^ golden.keys())]


def composed(*overrides: str) -> DictConfig:
    """The config of the command with these words."""
    with initialize_config_dir(str(DEFAULT_CONFIG_PATH), version_base=None):
        return compose("fabric_model_fusion", overrides=list(overrides), return_hydra_config=True)


@cache
def _base(pool: str) -> dict[str, Any]:
    base = composed(f"modelpool={pool}").modelpool.models["_pretrained_"]
    is_path = isinstance(base, str)
    return saved_tensors(Path(base if is_path else base.pretrained_model_name_or_path))


def saved_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of a saved model, corrections included."""
    files = sorted(folder.glob("*.safetensors"))
    return {stable_name(name): t for file in files for name, t in load_file(file).items()}


def _run(config: DictConfig) -> None:
    """Run a config as FusionBench's command does."""
    HydraConfig.instance().set_config(config)
    try:
        words = copy.deepcopy(config)
        with read_write(words), open_dict(words):
            del words["hydra"]
        OmegaConf.resolve(words)
        instantiate(words).run()
    finally:
        HydraConfig.instance().cfg = None


def run_method(name: str, folder: Path, words: Iterable[str] = ()) -> None:
    """Run a method on a suite in this process.

    Args:
        name: One of RUNS.
        folder: For `log` and `saved`, the model.
        words: Further words of the command.
    """
    method, pool, settings = RUNS[name]
    config = composed(
        f"method={method}",
        f"modelpool={pool}",
        *([] if name == EVALUATED else ["~modelpool.default_taskpool"]),
        "fabric/loggers=csv_logger",
        "print_config=false",
        "report_save_path=null",  # FusionBench leaves that file open
        f"path.log_dir={folder}/log",
        f"hydra.runtime.output_dir={folder}/log",
        f"merged_model_save_path={folder}/saved",
        *(f"method.{word}" for word in settings),
        *words,
    )
    _run(config)


def sketch_of_run(name: str, folder: Path) -> Sketch:
    """Describe the model that a run saved beside the suite's base."""
    return sketch(_base(RUNS[name][1]), saved_tensors(folder / "saved"))


def method_sketch(name: str, folder: Path) -> Sketch:
    """Run a method on a suite and describe the model."""
    run_method(name, folder)
    return sketch_of_run(name, folder)


def _structure(value: Any) -> Any:
    """Nested keys with types. A list becomes the different structures of its items."""
    if isinstance(value, dict):
        return {stable_name(key): _structure(part) for key, part in sorted(value.items())}
    if isinstance(value, list):
        return sorted({json.dumps(_structure(part)) for part in value})
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "number" if is_number else type(value).__name__


def structure_of(file: Path) -> Any:
    """Structure of a report, log or read manifest of a run: keys and types, not values."""
    if file.suffix == ".csv":
        return next(csv.reader(file.read_text().splitlines()))
    if file.suffix == ".jsonl":
        records = [json.loads(line) for line in file.read_text().splitlines()]
        kinds = {str(record.get("kind")): _structure(record) for record in records}
        return dict(sorted(kinds.items()))
    content = json.loads(file.read_text())
    content.pop("hashes", None)  # of the row that is saved, tensor by tensor
    return _structure(content)


def reports_of(log_dir: Path) -> dict[str, Any]:
    """Structures of the reports of the evaluated run."""
    return {name: structure_of(log_dir / name) for name in REPORTS}
