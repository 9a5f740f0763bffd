"""FusionBench's stock pools with `method=featcal`: checked as they are, three run on stand-ins."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import fusion_bench_config
import pytest
from configs import as_job
from hydra.utils import instantiate
from omegaconf import OmegaConf, open_dict
from stock_pools import stand_ins
from stock_pools.stand_ins import StandIns

from fusion_bench_featcal.fusionbench.pool_models import PoolModels

# Of FusionBench's methods, which no part of this package raises.
KINDS = ("DeprecationWarning", "FutureWarning", "UserWarning")
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in KINDS]
POOLS = Path(next(iter(fusion_bench_config.__path__))) / "modelpool"
NAMES = sorted(str(file.relative_to(POOLS).with_suffix("")) for file in POOLS.rglob("*.yaml"))
CPU = ("fabric.accelerator=cpu", "fabric.devices=1")
NO_EXPERT = r"modelpool\.models has no expert \(it has _pretrained_\)"
NO_DATA = "task '.*' has no calibration data"
# Patterns of names, and why such a pool cannot run as it is. All others come to their downloads.
REFUSED = {
    # the first that matches counts
    ".*/_template": "Missing mandatory value: modelpool.models",
    "(CLIP|Seq2Seq).*_(individual|mtl)": NO_EXPERT,
    "CausalLMPool/(deepseek-v2-lite|mi[sx]tral-.*7b)": NO_EXPERT,
    "CausalLMPool/(llama_(alpaca.*|codealpaca|metamathqa|ultrachat)|single_llama.*)": NO_EXPERT,
    "ConvNext.*/convnext-base-224|Dinov2.*|ResNet.*": NO_EXPERT,
    "SequenceClassificationModelPool/(?!roberta).*": NO_EXPERT,
    "CLIP.*_individual_lora": "the pool has no base model",
    "CLIP.*_(lora|control_task|model_only|single_.*|svhn_and_mnist)": NO_DATA,
    "(CausalLM|ConvNext|Seq2Seq).*|nyuv2_modelpool": NO_DATA,
    "OpenCLIP.*": "open_clip is not installed",
    # loads its tokenizer at once, and transformers 4.57 has no message for a missing network
    "gpt-2_glue": "downloads begin|not NoneType",
    # broken in FusionBench
    ".*_robustness_corrupted": "Interpolation key 'corruption' not found",
    ".*/roberta-base_glue": "Could not load 'model/roberta/roberta_glue-stsb'",
    "automodelpool|smile_mistral.*": "No module named 'fusion_bench.compat.modelpool.huggingface",
}


class FetchingError(Exception):
    """A run passed all checks that need no download."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_pool_passes_the_checks_before_downloads_or_is_refused_by_its_cause(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_models(_: PoolModels) -> None:
        raise FetchingError("downloads begin")

    monkeypatch.setattr(PoolModels, "open", open_models)
    cause = next((REFUSED[key] for key in REFUSED if re.fullmatch(key, name)), "downloads begin")
    with (
        pytest.raises(Exception, match=cause),
        as_job(tmp_path, "method=featcal", f"modelpool={name}", *CPU) as config,
    ):
        instantiate(config, _recursive_=False).run()


def redirected(node: Any, models: StandIns) -> Any:
    """The config with folders of stand-ins in place of the hub ids of models."""
    if isinstance(node, Mapping):
        return {
            key: value if key.endswith("_datasets") else redirected(value, models)
            for key, value in node.items()
        }
    is_hub_id = isinstance(node, str) and re.fullmatch(r"[\w-]+/[\w.-]+", node)
    return models.model(node) if is_hub_id else node


def load_dataset(path: str, config: str = "", **_: Any) -> datasets.Dataset:
    """As `datasets.load_dataset`, from a hub of stand-ins."""
    return stand_ins.glue(config) if "glue" in path else stand_ins.pictures()


VICUNA = (
    "modelpool=CausalLMPool/vicuna-7b-v1.5",
    "method@method.base_method=linear/llama_expo",  # a merger that asks for more than averages
    "+method.calibration_data.finetuned_model=texts.jsonl",
)
WHOLE_RUNS = {
    "clip": (
        "modelpool=clip-vit-base-patch32_TA8",
        "modelpool.default_taskpool.dataloader_kwargs.num_workers=0",  # 8 would start 8 processes
    ),
    "flan_t5": ("modelpool=flan-t5-base_glue",),
    "language_model": VICUNA,
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("words", WHOLE_RUNS.values(), ids=WHOLE_RUNS)
def test_a_pool_runs_on_stand_ins(words, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = [f'{{"prompt": "{text}", "target": "b"}}' for text in stand_ins.TEXTS]
    Path("texts.jsonl").write_text("\n".join(rows))
    with as_job(tmp_path, "method=featcal", "method.samples_per_task=2", *CPU, *words) as config:
        pool: Any = OmegaConf.to_container(config.modelpool, resolve=True)
        with open_dict(config):
            config.modelpool = redirected(pool, StandIns(tmp_path))
        results = instantiate(config, _recursive_=False).run()
    model = results["merged_model"]
    assert all(parameter.isfinite().all() for parameter in model.parameters())
