"""Properties of every rival, on images, texts and encoders. A new rival is a row of `RIVALS`."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from encoder_pools import encoder_pool
from rivals import DRAW, improved
from sample_pools import three_texts
from tiny_pools import TASKS, assert_equal, inputs_of, pixels_of, tiny_pool
from tiny_texts import text_pool
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.lab import rivals

CONFIGS = Path(__file__).parents[2] / "config" / "method"
TRAINED = DRAW | {"steps": 3}
OURS = TRAINED | {"stream": "calibration"}
# Class in `lab.rivals` -> settings that make it short.
RIVALS: dict[str, dict[str, Any]] = {
    "FeatCal": DRAW,
    "Distillation": TRAINED,
    "ProDistill": DRAW | {"epochs": 2},
    "RegMean": DRAW,
    "RegMeanPlusPlus": DRAW,
    "Lot": DRAW,
    "ESM": DRAW,
    "DCMerge": {"density": 0.1},
    "RidgeSurgery": DRAW,
    "Surgery": OURS,
    "ProbSurgery": OURS | {"hidden": 5},
    "SurgeryV2": OURS | {"rank": 2},
}
CASES = [
    *((kind, "clip") for kind in RIVALS),
    *((kind, "causal") for kind in ("Distillation", "ProDistill", "ESM", "Surgery")),
    *((kind, "seq2seq") for kind in ("ESM", "DCMerge", "ProbSurgery", "RidgeSurgery")),
    *((kind, "bert") for kind in ("FeatCal", "ProDistill", "ESM", "DCMerge", "SurgeryV2")),
    *((kind, "dino") for kind in ("Distillation", "RidgeSurgery")),
]


@pytest.fixture(scope="module")
def pool_of(models, tmp_path_factory) -> Any:
    """Pool of a kind of models."""

    def make(setup: str) -> Any:
        if setup == "clip":
            return tiny_pool(models)
        make_pool = encoder_pool if setup in ("bert", "dino") else text_pool
        return make_pool(setup, tmp_path_factory.mktemp(setup))

    return cache(make)


def merged_model(pool: Any) -> Any:
    name = "_merged_" if "_merged_" in pool.all_model_names else "_pretrained_"
    return pool.load_model(name).eval()


@pytest.fixture(scope="module")
def fitted(pool_of) -> Any:
    """A rival and its model of a pool, fitted once."""

    def fit(kind: str, setup: str) -> Any:
        pool = pool_of(setup)
        return improved(kind, inputs_of(pool), merged_model(pool), **RIVALS[kind])

    return cache(fit)


@torch.no_grad()
def output(model: Any, batch: dict[str, Tensor], task: str) -> Tensor:
    """Features or scores of a task, corrected if the model has corrections."""
    if getattr(model, "final_norm", None) is not None:
        with model.for_task(task):
            return model(**batch).logits
    if hasattr(model, "corrections"):
        return model.features(task, **batch)
    result = model(**batch)
    return result.logits if "logits" in result else result.pooler_output


def test_every_method_with_a_config_is_a_row() -> None:
    files = [*CONFIGS.glob("*surgery.yaml"), *(CONFIGS / "featcal_baselines").glob("*.yaml")]
    files += [CONFIGS / "featcal_mergers" / f"{name}.yaml" for name in ("dc_merge", "esm")]
    names = {getattr(rivals, kind)().name for kind in RIVALS} - {"featcal"}
    assert {file.stem for file in files} == names


@pytest.mark.parametrize(("kind", "setup"), CASES)
def test_a_model_is_finite_described_and_survives_saving(
    kind, setup, fitted, pool_of, models, tmp_path
) -> None:
    (method, model), pool, few = fitted(kind, setup), pool_of(setup), RIVALS[kind]
    tasks, merged = list(pool.model_names), merged_model(pool)
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert_equal(loaded, model)
    if setup == "clip":
        batch = {"pixel_values": pixels_of(models, pool.load_train_dataset(TASKS[0]))}
    elif setup in ("bert", "dino"):
        batch = next(iter(inputs_of(pool).batches(FeatCalSettings())[tasks[0]]))
    else:
        batch = three_texts(setup)
    for task in tasks:  # products of unaligned tensors round differently
        torch.testing.assert_close(output(loaded, batch, task), output(model, batch, task))
    if hasattr(model, "corrections"):
        assert_equal(model.model, merged)
        assert loaded.tasks == model.tasks
        with pytest.raises(OSError, match="no file named"):  # without its corrections
            type(model.model).from_pretrained(tmp_path)
    else:
        states = model.state_dict(), merged.state_dict()
        shapes = [{name: (v.shape, v.dtype) for name, v in state.items()} for state in states]
        assert shapes[0] == shapes[1] and type(model) is type(merged)
    with_samples = tasks if "samples_per_task" in few else []
    used = {task: {"samples": 8, "split": "train"} for task in with_samples}
    assert method.samples([*tasks, "another"]) == used
    corrections = getattr(model, "corrections", torch.nn.Module())
    assert sum(method.added(model).values()) == sum(p.numel() for p in corrections.parameters())
    assert json.loads(json.dumps(method.settings)).items() >= few.items()
    if "steps" in few:
        assert {curve[-1][0] for curve in model.curves.values()} == {few["steps"]}


@pytest.mark.parametrize(
    "kind", ["Distillation", "ProDistill", "ESM", "Lot", "RidgeSurgery", "Surgery"]
)
def test_its_algorithm_repeats_it_without_labels_and_leaves_experts(kind, fitted, models) -> None:
    """Labels of images and the test split play no part."""
    is_merger = hasattr(getattr(rivals, kind), "merge")
    pool = tiny_pool({n: path for n, path in models.items() if n != "_merged_" or not is_merger})
    pool._models = {name: pool.load_model(name).eval() for name in pool._models}
    before, images = copy.deepcopy(pool._models), pool.load_train_dataset
    pool.load_train_dataset = lambda task: [row | {"label": 7} for row in images(task)]
    pool.load_test_dataset = lambda task: pytest.fail("test data was read")
    clip_model = {"clip_model": models["_pretrained_"]} if "Surgery" in kind else {}
    result = getattr(rivals, f"{kind}Algorithm")(**RIVALS[kind], **clip_model).run(pool)
    assert_equal(result, fitted(kind, "clip")[1])
    for name in set(before) - {"_merged_"}:  # that one is improved in place
        assert_equal(pool._models[name], before[name])
