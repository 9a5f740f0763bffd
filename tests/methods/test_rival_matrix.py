"""Properties of every rival, on images and on language models. A new rival is a row of `RIVALS`."""

import copy
import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rivals import RIVALS, Rival
from tiny_models import add_up
from tiny_pools import assert_equal, inputs_of, tiny_pool
from torch import Tensor

from fusion_bench_featcal.lab import rivals

CONFIGS = Path(__file__).parents[2] / "config" / "method"
KINDS = pytest.mark.parametrize("rival", RIVALS.values(), ids=RIVALS)
WITH_DATA = [rival for rival in RIVALS.values() if rival.kind != "AnchorOnly"]


def at(*setups: str) -> Any:
    """The cases of every rival at these setups."""
    cases = [(rival, setup) for rival in RIVALS.values() for setup in setups]
    fitting = [case for case in cases if case[0].texts or case[1] == "clip"]
    ids = [f"{rival.kind}-{setup}" for rival, setup in fitting]
    return pytest.mark.parametrize(("rival", "setup"), fitting, ids=ids)


@pytest.fixture(scope="module")
def methods(setups) -> Any:
    """The rival of a setup, and its model there, made once."""

    def make(kind: str, setup: str) -> Any:
        return RIVALS[kind].run(inputs_of(setups[setup].pool), setups[setup].merged())

    return cache(make)


@pytest.fixture(scope="module")
def model_of(methods) -> Any:
    return lambda kind, setup: methods(kind, setup)[1]


def run(rival: Rival, setup: SimpleNamespace, pool: Any = None, **settings: Any) -> Any:
    return rival.run(inputs_of(pool or setup.pool), setup.merged(), **settings)[1]


@torch.no_grad()
def output(model: Any, batch: dict[str, Tensor], task: str | None = None) -> Tensor:
    """Corrected features or scores of a task; without corrections those of the model."""
    if hasattr(model, "for_task"):
        with model.for_task(task):
            return model(**batch).logits
    if hasattr(model, "corrections"):
        return model.features(task, **batch)
    result = model(**batch)
    return result.pooler_output if "pixel_values" in batch else result.logits


def tasks_of(pool: Any) -> list[str]:
    return list(pool.model_names)


def test_every_method_with_a_config_is_a_row() -> None:
    files = [*CONFIGS.glob("*surgery.yaml"), *(CONFIGS / "featcal_baselines").glob("*.yaml")]
    named = {rival.method().name for rival in RIVALS.values()} - {"featcal"}
    # the models of this matrix have no BatchNorm
    assert {file.stem for file in files} - {"batch_norm_statistics"} == named


@at("clip", "seq2seq", "causal")
def test_tensors_are_finite_and_of_the_merged_models_shapes(rival, setup, model_of, setups) -> None:
    model, merged = model_of(rival.kind, setup), setups[setup].merged()
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    if rival.corrects:
        return assert_equal(model.model, merged)
    shapes = [{n: (v.shape, v.dtype) for n, v in m.state_dict().items()} for m in (model, merged)]
    assert shapes[0] == shapes[1]
    assert type(model) is type(merged)


@at("clip", "seq2seq")
def test_a_run_repeats_itself_on_models_in_memory_and_leaves_them(
    rival, setup, model_of, setups, models
) -> None:
    where = setups[setup]
    loaded = {name: where.pool.load_model(name).eval() for name in where.pool._models}
    before, pool = copy.deepcopy(loaded), copy.copy(where.pool)
    pool._models = loaded
    options: Any = {}
    if rival.corrects and setup == "clip":
        options["clip_model"] = models["_pretrained_"]
    assert_equal(run(rival, where, pool, **options), model_of(rival.kind, setup))
    for name, model in loaded.items():
        assert_equal(model, before[name])


@pytest.mark.parametrize("rival", WITH_DATA, ids=lambda rival: rival.kind)
def test_another_seed_is_another_model(rival, model_of, setups) -> None:
    assert_equal(run(rival, setups["clip"], seed=7), model_of(rival.kind, "clip"), equal=False)


@at("clip", "causal")
def test_without_strength_nothing_changes(rival, setup, setups) -> None:
    if rival.nothing is None:
        return
    where = setups[setup]
    model, expected = run(rival, where, **rival.nothing), where.merged()
    if rival.start != "merged":
        base = where.pool.load_model("_pretrained_")
        experts = {task: where.pool.load_model(task) for task in tasks_of(where.pool)}
        expected = add_up(base, experts, rival.start)
    for task in tasks_of(where.pool):
        result, reference = output(model, where.batch, task), output(expected.eval(), where.batch)
        if rival.corrects and setup == "clip":
            reference = model.projection(reference)
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)


@at("clip", "seq2seq", "causal")
def test_saved_and_loaded_it_is_the_same(rival, setup, model_of, setups, tmp_path) -> None:
    model, batch = model_of(rival.kind, setup), setups[setup].batch
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    for task in tasks_of(setups[setup].pool):  # products of unaligned tensors round differently
        torch.testing.assert_close(output(loaded, batch, task), output(model, batch, task))
    if rival.corrects:
        for name in ("tasks", "samples", "curves"):
            assert getattr(loaded, name) == getattr(model, name), name
        assert loaded.added() == model.added()
        with pytest.raises(OSError, match="no file named"):  # without its corrections
            type(model.model).from_pretrained(tmp_path)


@at("clip", "causal")
def test_answers_are_not_read(rival, setup, model_of, setups) -> None:
    """Labels of images; answers of texts where the experts' own are taken."""
    pool, before = copy.copy(setups[setup].pool), setups[setup].pool.load_train_dataset
    settings: dict[str, Any] = {}
    if setup == "clip":
        change: dict[str, Any] = {"label": 7}
    elif "calibration_targets" in rival.method().settings:
        change, settings = {"target": "t s"}, {"calibration_targets": "generated"}
        settings["generated_tokens"] = 3
    else:
        return
    pool.load_train_dataset = lambda task: [row | change for row in before(task)]
    pool.load_test_dataset = lambda task: pytest.fail("test data was read")
    reference = run(rival, setups[setup], **settings) if settings else model_of(rival.kind, setup)
    assert_equal(run(rival, setups[setup], pool, **settings), reference)
    if settings:
        assert_equal(run(rival, setups[setup], pool), model_of(rival.kind, setup), equal=False)


@at("clip", "seq2seq", "causal")
def test_says_what_it_used_and_added(rival, setup, methods, setups) -> None:
    where, (method, model) = setups[setup], methods(rival.kind, setup)
    tasks = tasks_of(where.pool)
    used = {"samples": 8, "split": "train"}
    expected = {} if rival.kind == "AnchorOnly" else dict.fromkeys(tasks, used)
    assert method.samples(model, [*tasks, "another"]) == expected
    parts = getattr(model, "corrections", torch.nn.Module())
    assert sum(method.added(model).values()) == sum(part.numel() for part in parts.parameters())
    assert json.loads(json.dumps(method.settings)).items() >= dict(rival.few).items()
    if "steps" in rival.few:
        assert {task: curve[-1][0] for task, curve in model.curves.items()} == dict.fromkeys(
            tasks, 5
        )


@KINDS
def test_its_algorithm_gives_the_same(rival, model_of, models) -> None:
    if rival.kind == "FeatCal":  # method=featcal has an algorithm of its own
        return
    algorithm = getattr(rivals, f"{rival.kind}Algorithm")(**rival.few)
    names = [name for name in models if not (rival.merges and name == "_merged_")]
    pool = tiny_pool({name: models[name] for name in names})
    assert_equal(algorithm.run(pool), model_of(rival.kind, "clip"))
