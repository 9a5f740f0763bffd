"""The default grid of `method=compare` on tiny pools of texts and encoders."""

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from comparison_parts import FakeProgram
from configs import composed
from encoder_pools import encoder_pool, rows
from hydra.utils import instantiate
from safetensors.torch import save_file
from tiny_models import normal
from tiny_texts import TASKS, sentences, text_pool, text_tokenizer

from fusion_bench_featcal.results import read_run
from fusion_bench_featcal.tasks import EncoderTaskPool, TextTaskPool

pytestmark = pytest.mark.slow

FEATCAL, EVERY = {"featcal", "ridge_surgery"}, {"regmean", "regmean_plusplus", "lot"}
ENCODER = FEATCAL | {"featcal_plus", "distillation", "featcal_plus_ridge_surgery"}
SURGERY = {f"{name}{end}" for name in ("surgery", "prob_surgery") for end in ("", "_calibration")}
VERSION_2 = {"surgery_v2", "surgery_v2_calibration"}
TEXT = FEATCAL | SURGERY | {"featcal_paper_flan_t5"}
# Pool of a suite -> methods that run over WUDI, and that must not.
SUITES: dict[str, tuple[str, set[str], set[str]]] = {
    "seq2seq": ("flan-t5-mini_TA6", TEXT, VERSION_2),
    "causal": ("llama-mini_TA6", TEXT, VERSION_2),
    "bert": ("minilm_TA6", ENCODER | SURGERY | VERSION_2, set()),
    "dino": ("dinov2_small_TA4", ENCODER | SURGERY | VERSION_2, set()),
}
FEW = "samples_per_task=6 steps=2 upstream_mergers.wudi.iter_num=2 upstreams=[wudi]"
ENCODERS = "method.leave_out=null +method.post_merging_methods.distillation.steps=2 "
ENCODERS += "method.mergers_alone.prodistill.epochs=1"


def pools(kind: str, folder: Path) -> tuple[Any, Any]:
    """A model pool and a task pool."""
    if kind in ("seq2seq", "causal"):
        tests = {task: sentences(task, 6) for task in TASKS}
        taskpool = TextTaskPool(tests, tokenizer=text_tokenizer(kind), max_new_tokens=3)
        return text_pool(kind, folder), taskpool
    pool, tests = encoder_pool(kind, folder), {task: rows(kind, task, 6) for task in TASKS}
    save_file({"head": normal(0, 3, 16).float()}, folder / "head.safetensors")
    heads = {task: {"file": str(folder / "head.safetensors")} for task in TASKS}
    options: Any = {} if kind == "bert" else {"pooling": "cls", "heads": heads}
    return pool, EncoderTaskPool(tests, base_model=str(folder / "pretrained"), **options)


@pytest.mark.parametrize("kind", SUITES)
def test_no_cell_of_the_default_grid_fails(kind: str, tmp_path: Path) -> None:
    suite, run_over_wudi, absent = SUITES[kind]
    words = [f"method.{word}" for word in (*FEW.split(), f"results_dir={tmp_path}/cells")]
    words += ENCODERS.split() if kind in ("bert", "dino") else []
    config = composed("method=compare", f"modelpool={suite}", *words)
    algorithm = instantiate(config.method, _recursive_=False)
    pool, taskpool = pools(kind, tmp_path / "models")
    algorithm._program = FakeProgram(taskpool)
    algorithm._program._modelpool = {"featcal": config.modelpool.featcal}
    algorithm.run(pool)
    run = read_run(tmp_path / "cells" / "table")
    names = {row.name for row in run.rows if row.merger == "wudi"}
    assert run_over_wudi <= names and not absent & names
    mergers = {row.merger for row in run.rows}
    assert mergers >= EVERY and ("prodistill" in mergers) == (kind in ("bert", "dino"))
    assert all(map(math.isfinite, chain(*(row.scores["loss"].values() for row in run.rows))))
