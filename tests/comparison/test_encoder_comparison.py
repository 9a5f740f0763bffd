"""`method=compare` on pools of encoders without a head."""

import math
from pathlib import Path

import pytest
from comparison_parts import FakeProgram
from configs import composed
from encoder_pools import encoder_pool, rows
from hydra.utils import instantiate
from safetensors.torch import save_file
from tiny_models import normal
from tiny_texts import TASKS

from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.tasks import EncoderTaskPool

SUITES = {"bert": "minilm_TA6", "dino": "dinov2_small_TA4"}
ALONE = {"regmean", "regmean_plusplus", "lot", "prodistill"}
METHODS = {"featcal", "featcal_plus", "distillation", "ridge_surgery", "featcal_plus_ridge_surgery"}
SURGERIES = ("surgery", "prob_surgery", "surgery_v2")


@pytest.mark.slow
@pytest.mark.parametrize("kind", SUITES)
def test_every_method_runs_on_encoders(kind: str, tmp_path: Path) -> None:
    """WUDI's result is finite although the experts leave some matrices as they are."""
    few = ["samples_per_task=6", "steps=2", "upstream_mergers.wudi.iter_num=2", "leave_out=null"]
    few += [f"results_dir={tmp_path}/cells", "upstreams=[wudi]"]
    words = [f"modelpool={SUITES[kind]}", *(f"method.{word}" for word in few)]
    words += ["+method.post_merging_methods.distillation.steps=2"]
    config = composed("method=compare", *words, "method.mergers_alone.prodistill.epochs=1")
    algorithm = instantiate(config.method, _recursive_=False)
    pool = encoder_pool(kind, tmp_path / "models")
    tests = {task: rows(kind, task, 6) for task in TASKS}
    base = str(tmp_path / "models" / "pretrained")
    save_file({"head": normal(0, 3, 16).float()}, tmp_path / "head.safetensors")
    heads = {task: {"file": str(tmp_path / "head.safetensors")} for task in TASKS}
    options = {} if kind == "bert" else {"pooling": "cls", "heads": heads}
    taskpool = EncoderTaskPool(tests, base_model=base, **options)  # type: ignore[arg-type]
    algorithm._program = FakeProgram(taskpool)
    algorithm._program._modelpool = {"featcal": config.modelpool.featcal}
    algorithm.run(pool)
    run = read_run(tmp_path / "cells" / "table")
    over_wudi = {row.name for row in run.rows if row.merger == "wudi"}
    expected = METHODS | {f"{name}{end}" for name in SURGERIES for end in ("", "_calibration")}
    assert over_wudi - {"wudi"} == expected
    assert {row.merger for row in run.rows} >= ALONE
    assert all(math.isfinite(loss) for row in run.rows for loss in row.scores["loss"].values())
