"""Every method, pool and task pool of `config/` starts or says why not, and plans say the same."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from configs import CONFIG, as_job, composed, plan_run
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from fusion_bench_featcal.errors import CalibrationError, ReportError
from fusion_bench_featcal.errors.block import error_block
from fusion_bench_featcal.errors.words import using_vocabulary
from fusion_bench_featcal.folders import calibrate_folder
from fusion_bench_featcal.fusionbench.config_checks import (
    ROOT_KEYS,
    check_config,
    check_root_keys,
)
from fusion_bench_featcal.fusionbench.console import WORDS, FeatCalJob, explained
from fusion_bench_featcal.fusionbench.program_processes import open_fabric

KINDS = ("DeprecationWarning", "FutureWarning", "UserWarning")  # of FusionBench's pools
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in KINDS]
TINY = "modelpool=clip-vit-mini_alphabets2"
CPU = "fabric.accelerator=cpu"
FEW = {"samples_per_task": 4, "steps": 1, "presets": "{}", "iter_num": 1}
DOWNLOADS = "HF_HUB_OFFLINE is set"  # the first model would be fetched
# Task pools that cannot start here, with the reason. All others are of the hub, or start.
REFUSED = {
    "dinov2_small_TA4|minilm_TA6|mpnet_TA6|smollm2_TA4|whisper_TA4": (
        "no pretrained weights '.*' in the folder"
    ),
    "mergebench_llama": "this task pool needs lm-eval",
    "open-clip-vit-mini_TA6": "needs open_clip, which cannot be imported",
}
# Methods that refuse the pool's models, and plans of them, with the message.
OTHER_MODELS = {
    "featcal_baselines/harc": "harc fits routers of mixtures, but CLIPVisionModel has none",
    "featcal_baselines/mopd": "mopd trains only models that answer texts with texts",
    "featcal_baselines/seqkd": "seqkd trains only models that answer texts with texts",
}
# Task pools without a model pool of the same name.
POOL_OF = {
    "clip-vit-own-tasks": "clip-vit-mini_TA6",
    "flan-t5_glue": "flan-t5-base_glue",
    "mergebench_llama": "mergebench_llama-3.2-3b-instruct",
}


BEGINNINGS = (
    "streams.streams.Streams.enter_stage", "fusionbench.report.Report.add",
    "lab.compare.cells.CellRunner.run", "fusionbench.upstream.run_merger",
)  # fmt: skip


class Started(BaseException):
    """A run passed its checks: it has a first block, or evaluates a first model."""


def options(group: str) -> list[str]:
    """Names of the YAML files of a group."""
    files = sorted((CONFIG / group).rglob("*.yaml"))
    return [file.relative_to(CONFIG / group).with_suffix("").as_posix() for file in files]


@using_vocabulary(WORDS)
def run(folder: Path, *words: str) -> None:
    """Run as the program does, with the checks of the console, up to the first block."""
    with as_job(folder, *words) as config:
        for name in FEW.keys() & config.method.keys():
            config.method[name] = {} if name == "presets" else FEW[name]
        check_config(config)
        open_fabric(config.fabric)
        instantiate(config, _recursive_=False).run()


@pytest.fixture(autouse=True)
def stopping(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stop runs where their work begins."""

    def stop(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(yaml, "SafeLoader", yaml.CSafeLoader)  # plans compose a third faster
    for place in BEGINNINGS:
        monkeypatch.setattr(f"fusion_bench_featcal.{place}", stop)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in options("method") if name not in OTHER_MODELS])
def test_every_method_starts(name: str, tmp_path: Path) -> None:
    is_merger = "_target_: fusion_bench." in (CONFIG / "method" / f"{name}.yaml").read_text()
    words = (
        ("method=featcal", f"method@method.base_method={name}")
        if is_merger
        else (f"method={name}",)
    )
    plan_run([*words, TINY, CPU])
    with pytest.raises(Started):
        run(tmp_path, *words, TINY, CPU)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_methods_of_other_models_are_refused_in_plan_and_run(name: str, tmp_path: Path) -> None:
    words = (f"method={name}", TINY, CPU)
    with pytest.raises(CalibrationError, match=OTHER_MODELS[name]):
        plan_run([*words])
    with pytest.raises(CalibrationError, match=OTHER_MODELS[name]):
        run(tmp_path, *words)


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("name", ["mopd", "seqkd"])
def test_methods_of_language_models_start(name: str, tmp_path: Path) -> None:
    words = (f"method=featcal_baselines/{name}", "modelpool=llama-mini_TA6", CPU)
    plan_run([*words])
    with pytest.raises(Started):
        run(tmp_path, *words)


POOLS = options("modelpool")
PAIRS = [(pool, "dummy") for pool in POOLS if pool not in options("taskpool")]
PAIRS += [(POOL_OF.get(name, name), name) for name in options("taskpool")]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("pool", "taskpool"), PAIRS)
def test_every_pool_starts_or_is_refused_by_its_cause(pool: str, taskpool: str, tmp_path: Path):
    words = (f"modelpool={pool}", f"taskpool={taskpool}", CPU)
    causes = (REFUSED[names] for names in REFUSED if re.fullmatch(names, taskpool))
    cause = next(causes, DOWNLOADS)
    with pytest.raises(BaseException) as caught:
        run(tmp_path, "method=featcal", *words)
    assert isinstance(caught.value, Started) or re.search(cause, str(caught.value))


WITHOUT_SAMPLES = (
    "method=compare method.upstreams=[lot] method.post_merging=[] method.calibration_split=val"
)
# Words of a run, and the message about them.
CARELESS = {
    "method=featcal/plus method.ridge_lambda=0.1": "ridge_lambda=0.1 has no effect with the rule",
    "method.task_weights={mini_korean:2}": "rule paper: .*, or choose method=featcal/plus",
    "method.task_weights=5": "method.task_weights must be null or a mapping",
    "method.family=lama": "family must be auto, clip, encoder_decoder",
    "+fabric.acelerator=cpu": "fabric cannot be made: .*'acelerator'",
    "+modelpool.default_taskpool.tasks.mini_korean.clasnames=[a]": "clasnames is unknown .nearest",
    "+modelpool.default_taskpool.tasks.other={}": "'other' has no test data: set taskpool.tasks",
    "modelpool.test_datasets.mini_korean=./nowhere": "mini_korean=./nowhere: there is no such file",
    "modelpool.test_datasets.mini_korean.split=dev": "mini_korean: it .* loaded: .* split 'dev'",
    "method=compare modelpool.test_datasets.mini_korean.split=dev": "cannot be loaded: .*'dev'",
    "modelpool.default_taskpool.processor=./nowhere": "taskpool.processor=./nowhere: there is no",
    "modelpool.models.mini_korean=5": "modelpool.models.mini_korean is 5, which is not a model",
    "~modelpool.models._pretrained_": "the pool has no base model",
    "method.base_method=null": "method.base_method is null, but the pool has no merged model",
    "merged_model_save_path=/proc/x/y": "cannot write /proc/x: .*merged_model_save_path",
    "method.expert_read_budget=1%": "expert_read_budget=1% is too small",
    "method.calibration_split=val": "task 'mini_balinese' has no calibration data",
    "method=compare taskpool=dummy": "compare needs a task pool",
    "method=compare merged_model_save_path=x": "compare saves no model",
    WITHOUT_SAMPLES: r"^method\.upstream_mergers\.lot: task .* has no calibration data",
    "method=diagnose method.tasks=[abc]": "method.tasks: expert abc is unknown",
    "seed=abc": "seed must be null or an integer, got 'abc'",
    "+ridge_lambda=0.1": "ridge_lambda is a setting of the method: write method.ridge_lambda=...",
    "ridge_lambda=0.1": "ridge_lambda is a setting of the method: write method.ridge_lambda=...",
    "+ridge_lamda=0.1": r"ridge_lamda is unknown and has no effect \(nearest: 'method",
    "+taskpools=x": r"taskpools is unknown and has no effect \(nearest: 'taskpool'\)",
}


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("line", CARELESS)
def test_a_plan_refuses_what_its_run_refuses(line: str, tmp_path: Path) -> None:
    words = [TINY, *line.split()]
    words += [] if line.startswith("method=") else ["method=featcal"]
    with pytest.raises(
        (ValueError, CalibrationError, ReportError), match=CARELESS[line]
    ) as planned:
        plan_run(words)
    with pytest.raises(Exception) as caught:
        run(tmp_path, *words)
    error = caught.value
    message = explained(error) if isinstance(error, ConfigCompositionException) else error
    assert error_block(message) == error_block(planned.value)


def test_a_plan_opens_test_data_of_fusion_benchs_own_task_pool() -> None:
    split = "modelpool.default_taskpool.test_datasets.mini_mnist.split=dev"
    with pytest.raises(CalibrationError, match=r"^taskpool: it cannot be loaded: .* split 'dev'"):
        plan_run(["modelpool=resnet-mini_TA3", split, CPU])


def test_the_keys_of_the_program_are_known() -> None:
    assert {"hydra", *composed()} == set(ROOT_KEYS)
    # A key that another one reads is used.
    check_root_keys(["size"], composed("+size=8", "seed=${size}"))


def test_a_sweep_refuses_unknown_keys_at_the_root() -> None:
    config = OmegaConf.create({"method": {"seed": 1}, "hydra": {"overrides": {"task": []}}})
    FeatCalJob().on_multirun_start(config)
    config.hydra.overrides.task = ["+ridge_lambda=0.1,0.2"]
    config.method.ridge_lambda = 0.05
    with pytest.raises(SystemExit, match=r"^error: ridge_lambda is a setting of the method"):
        FeatCalJob().on_multirun_start(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ["cuda", "gpu"])
def test_a_missing_gpu_is_named_at_the_start_of_both_doors(name: str, tmp_path: Path) -> None:
    message = r"this torch .* has no CUDA\. Leave it out, or install|torch finds no GPU\. Leave it"
    with pytest.raises(ValueError, match=rf"^fabric\.accelerator={name}: ({message})"):
        plan_run([TINY, "method=featcal", f"fabric.accelerator={name}"])
    with pytest.raises(ValueError, match=rf"^fabric\.accelerator={name}: ({message})"):
        run(tmp_path, TINY, "method=featcal", f"fabric.accelerator={name}")
    here = str(tmp_path)
    options: Any = {"expert": {"a": here}, "base": here, "data": {"a": here}, "no_eval": True}
    for plan in (True, False):
        with pytest.raises(ValueError, match=rf"^--device {name}: ({message})"):
            calibrate_folder(here, **options, out=f"{here}/out", device=name, plan=plan)


def test_a_plan_counts_processes_that_it_does_not_start() -> None:
    words = [TINY, CPU, "fabric.devices=2"]
    with pytest.raises(CalibrationError, match=r"in one process, not in 2: set fabric\.devices=1"):
        plan_run([*words, "method=featcal_baselines/regmean"])
    assert plan_run(words).rows == {"featcal": 1, "featcal_plus": 1}


def test_a_plan_leaves_no_folder(tmp_path: Path) -> None:
    plan_run([TINY, CPU, "method.checkpoint_dir=new/blocks", "merged_model_save_path=saved/model"])
    assert [*tmp_path.iterdir()] == []
