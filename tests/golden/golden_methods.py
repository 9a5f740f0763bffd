"""FusionBench's side: methods run on the bundled suites, described by what they save."""

import copy
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import fusion_bench_featcal  # noqa: F401

# isort: split
from fusion_bench.constants.paths import DEFAULT_CONFIG_PATH
from fusion_bench.utils import instantiate
from golden_commands import PRESETS
from golden_models import stable_name
from golden_parameters import Sketch, sketch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from safetensors.torch import load_file

CLIP, T5, LLAMA = "clip-vit-mini_alphabets2", "flan-t5-mini_TA6", "llama-mini_TA6"
FEW = ("samples_per_task=8",)
ALONE = (*FEW, "presets={}")
TRAINED = (*FEW, "steps=5", "batch_size=4")
PEER = "featcal_baselines/"
RUNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "featcal": ("featcal", CLIP, ALONE),
    "featcal, whole": ("featcal", CLIP, (*ALONE, "stream_experts=false")),
    "featcal, other data": ("featcal", CLIP, (*ALONE, "seed=7", "calibration_split=test")),
    "featcal, preset": ("featcal", CLIP, (*FEW, PRESETS, "save=featcal:mini")),
    "featcal, t5": ("featcal", T5, ("samples_per_task=4", "presets={}")),
    "featcal, t5 generated": (
        "featcal/paper_flan_t5",
        T5,
        (
            "samples_per_task=2",
            "calibration_targets=generated",
            "generated_tokens=3",
            "max_length=16",
            "presets={}",
        ),
    ),
    "featcal, llama": (
        "featcal/paper_llama_3b",
        LLAMA,
        ("samples_per_task=4", "presets={}", "max_length=64"),
    ),
    "anchor_only": (PEER + "anchor_only", CLIP, ()),
    "regmean": (PEER + "regmean", CLIP, (*FEW, "task_weights=unit_gram")),
    "regmean_plusplus": (PEER + "regmean_plusplus", CLIP, FEW),
    "lot": (PEER + "lot", CLIP, FEW),
    "ridge_surgery": ("ridge_surgery", CLIP, FEW),
    "ridge_surgery, fixed": ("ridge_surgery", CLIP, (*FEW, "ridge_lambda=0.1", "normalize=pre")),
    "surgery": ("surgery", CLIP, TRAINED),
    "prob_surgery": ("prob_surgery", CLIP, TRAINED),
    "surgery_v2": (PEER + "surgery_v2", CLIP, TRAINED),
}
SLOW = (
    "featcal, t5",
    "regmean_plusplus",
    "lot",
    "surgery_v2",
    "featcal, whole",
    "featcal, other data",
    "featcal, t5 generated",
    "regmean",
    "ridge_surgery, fixed",
)
EVALUATED = "featcal, preset"
"""The run whose models are evaluated, which leaves a full report."""
BOUND = 2e-4


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
    """Do what FusionBench's command does with a config."""
    HydraConfig.instance().set_config(config)
    try:
        words = copy.deepcopy(config)
        with read_write(words), open_dict(words):
            del words["hydra"]
        OmegaConf.resolve(words)
        instantiate(words).run()
    finally:
        HydraConfig.instance().cfg = None


def method_sketch(name: str, folder: Path) -> Sketch:
    """Run a method on a suite and describe the saved model beside the suite's base.

    Args:
        name: One of RUNS.
        folder: For `log` and, while it is needed, the saved model.
    """
    method, pool, words = RUNS[name]
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
        *(f"method.{word}" for word in words),
    )
    _run(config)
    found = sketch(_base(pool), saved_tensors(folder / "saved"))
    shutil.rmtree(folder / "saved")
    return found
