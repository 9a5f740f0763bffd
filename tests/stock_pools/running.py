"""Composes a stock pool with `method=featcal`, points it at stand-ins, and runs it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from configs import as_job
from stock_pools.stand_ins import StandIns, glue

# isort: split
import fusion_bench_featcal.fusionbench.compat  # noqa: F401

# isort: split
import fusion_bench_config
from fusion_bench.dataset import gpt2_glue
from fusion_bench.tasks.flan_t5_text_generation import glue_load_dataset
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

POOLS = Path(next(iter(fusion_bench_config.__path__))) / "modelpool"
NAMES = sorted(str(file.relative_to(POOLS).with_suffix("")) for file in POOLS.rglob("*.yaml"))
FEW = ("method.samples_per_task=2", "fabric.accelerator=cpu", "fabric.devices=1")
_MODEL_KEYS = (
    "pretrained_model_name_or_path", "config_path", "base_model_path", "peft_model_path",
    "base_model_name", "peft_name", "model_name", "path",
)  # fmt: skip


def redirected(config: DictConfig, stand_ins: StandIns) -> DictConfig:
    """The config with folders of stand-ins in place of hub ids, and otherwise unchanged."""
    for name in ("modelpool", "taskpool"):
        group: Any = OmegaConf.to_container(config[name], resolve=True, throw_on_missing=True)
        for key, value in group.items():
            if key.endswith("_datasets") and value:
                group[key] = {task: _data(entry, stand_ins) for task, entry in value.items()}
            elif key in ("models", "tokenizer", "processor", *_MODEL_KEYS):
                group[key] = _models(value, stand_ins)
        with open_dict(config):
            config[name] = group
    return config


def _models(node: Any, stand_ins: StandIns, key: str = "path") -> Any:
    """A model's, tokenizer's or processor's entry."""
    if isinstance(node, Mapping):
        by_name = "_target_" not in node and not set(node) & {*_MODEL_KEYS, "encoder"}
        return {k: _models(v, stand_ins, "path" if by_name else k) for k, v in node.items()}
    if isinstance(node, list):
        return [_models(entry, stand_ins, key) for entry in node]
    is_local = isinstance(node, str) and node.startswith((".", "ViT-", "lightning_logs"))
    is_hub_id = isinstance(node, str) and key in _MODEL_KEYS and not is_local
    return stand_ins.model(node) if is_hub_id else node


def _data(entry: Any, stand_ins: StandIns) -> Any:
    """A dataset's entry."""
    if "tokenizer" in entry:  # GLUE, which `run` provides
        return entry | {"tokenizer": _models(entry["tokenizer"], stand_ins)}
    if entry["_target_"].endswith("load_fer2013"):
        return entry | {"path": stand_ins.images(image="jpg", label="cls")}
    if "_args_" in entry:
        config = entry["_args_"][1]
        return entry | {"_args_": [stand_ins.images(config=config), config]}
    is_plain = entry["_target_"] == "datasets.load_dataset"
    return entry | {"path": stand_ins.images()} if is_plain else entry


DATA = "DATA"
"""Word that stands for `method.calibration_data` of every expert, with a stand-in's file."""


def run(name: str, stand_ins: StandIns, words: Sequence[str] = ()) -> Any:
    """Run FusionBench's program on a stock pool in the current folder. `words` may have `DATA`."""
    command = ["method=featcal", f"modelpool={name}", *FEW, *(w for w in words if w != DATA)]
    with (
        as_job(Path.cwd(), *command) as config,
        mock.patch.object(glue_load_dataset, "load_dataset", glue),  # the hub id is in their code
        mock.patch.object(gpt2_glue, "load_dataset", glue),
    ):
        redirected(config, stand_ins)
        if DATA in words:
            tasks = [task for task in config.modelpool.models if not task.startswith("_")]
            is_text = "tokenizer" in config.modelpool
            file = stand_ins.texts() if is_text else f"{stand_ins.images()}/train.parquet"
            config.method.calibration_data = dict.fromkeys(tasks, file)
        return instantiate(config, _recursive_=False).run()
