"""Properties of every rival, on images and on language models. A new rival is a row of `RIVALS`."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from rivals import RIVALS
from tiny_models import add_up
from tiny_pools import assert_equal, inputs_of, tiny_pool
from torch import Tensor

from fusion_bench_featcal.lab import rivals

CONFIGS = Path(__file__).parents[2] / "config" / "method"
KINDS = pytest.mark.parametrize("kind", RIVALS)
CASES = [
    *((kind, "clip") for kind in RIVALS),
    *((kind, "causal") for kind, rival in RIVALS.items() if rival.texts),
    # test_mergers.py has the mergers on T5
    *((kind, "seq2seq") for kind, rival in RIVALS.items() if rival.texts and not rival.merges),
]


@pytest.fixture(scope="module")
def fitted(setups) -> Any:
    """The rival of a setup and its model there, fitted once."""

    def fit(kind: str, setup: str) -> Any:
        return RIVALS[kind].run(inputs_of(setups[setup].pool), setups[setup].merged())

    return cache(fit)


@torch.no_grad()
def output(model: Any, batch: dict[str, Tensor], task: str) -> Tensor:
    """Features or scores of a task, corrected if the model has corrections."""
    if hasattr(model, "for_task"):
        with model.for_task(task):
            return model(**batch).logits
    if hasattr(model, "corrections"):
        return model.features(task, **batch)
    result = model(**batch)
    return result.pooler_output if "pixel_values" in batch else result.logits


def test_every_method_with_a_config_is_a_row() -> None:
    files = [*CONFIGS.glob("*surgery.yaml"), *(CONFIGS / "featcal_baselines").glob("*.yaml")]
    names = {rival.method().name for rival in RIVALS.values()} - {"featcal"}
    # the models of this matrix have no BatchNorm
    assert {file.stem for file in files} - {"batch_norm_statistics"} == names


@pytest.mark.parametrize(("kind", "setup"), CASES)
def test_a_model_is_finite_described_and_survives_saving(
    kind, setup, fitted, setups, tmp_path
) -> None:
    rival, (method, model), merged = RIVALS[kind], fitted(kind, setup), setups[setup].merged()
    tasks, batch = list(setups[setup].pool.model_names), setups[setup].batch
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    for task in tasks:  # products of unaligned tensors round differently
        torch.testing.assert_close(output(loaded, batch, task), output(model, batch, task))
    if rival.corrects:
        assert_equal(model.model, merged)
        for name in ("tasks", "samples", "curves"):
            assert getattr(loaded, name) == getattr(model, name), name
        with pytest.raises(OSError, match="no file named"):  # without its corrections
            type(model.model).from_pretrained(tmp_path)
    else:
        states = model.state_dict(), merged.state_dict()
        shapes = [{name: (v.shape, v.dtype) for name, v in state.items()} for state in states]
        assert shapes[0] == shapes[1] and type(model) is type(merged)
    used = {"samples": 8, "split": "train"}
    expected = {} if kind == "AnchorOnly" else dict.fromkeys(tasks, used)
    assert method.samples(model, [*tasks, "another"]) == expected
    corrections = getattr(model, "corrections", torch.nn.Module())
    assert sum(method.added(model).values()) == sum(p.numel() for p in corrections.parameters())
    assert json.loads(json.dumps(method.settings)).items() >= dict(rival.few).items()
    if "steps" in rival.few:
        assert {curve[-1][0] for curve in model.curves.values()} == {rival.few["steps"]}


@KINDS
def test_its_algorithm_repeats_it_without_labels_and_leaves_experts(kind, fitted, models) -> None:
    """Labels of images and the test split play no part."""
    rival = RIVALS[kind]
    pool = tiny_pool({n: p for n, p in models.items() if n != "_merged_" or not rival.merges})
    pool._models = {name: pool.load_model(name).eval() for name in pool._models}
    before, images = copy.deepcopy(pool._models), pool.load_train_dataset
    pool.load_train_dataset = lambda task: [row | {"label": 7} for row in images(task)]
    pool.load_test_dataset = lambda task: pytest.fail("test data was read")
    options = {"clip_model": models["_pretrained_"]} if rival.corrects else {}
    if kind == "FeatCal":  # method=featcal has an algorithm of its own
        result = rival.run(inputs_of(pool), pool.load_model("_merged_"))[1]
    else:
        result = getattr(rivals, f"{kind}Algorithm")(**rival.few, **options).run(pool)
    assert_equal(result, fitted(kind, "clip")[1])
    for name in set(before) - {"_merged_"}:  # that one is improved in place
        assert_equal(pool._models[name], before[name])


@pytest.mark.parametrize("kind", [kind for kind in RIVALS if kind != "AnchorOnly"])
def test_another_seed_is_another_model(kind, fitted, setups) -> None:
    inputs, merged = inputs_of(setups["clip"].pool), setups["clip"].merged()
    result = RIVALS[kind].run(inputs, merged, seed=7)[1]
    assert_equal(result, fitted(kind, "clip")[1], equal=False)


@pytest.mark.parametrize("kind", [kind for kind in RIVALS if RIVALS[kind].nothing])
def test_without_strength_nothing_changes(kind, setups) -> None:
    rival, setup = RIVALS[kind], setups["clip"]
    tasks = list(setup.pool.model_names)
    model = rival.run(inputs_of(setup.pool), setup.merged(), **(rival.nothing or {}))[1]
    expected = setup.merged()
    if rival.start is not None:
        experts = {task: setup.pool.load_model(task) for task in tasks}
        expected = add_up(setup.pool.load_model("_pretrained_"), experts, rival.start)
    for task in tasks:
        reference = output(expected.eval(), setup.batch, task)
        reference = model.projection(reference) if rival.corrects else reference
        result = output(model, setup.batch, task)
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-5)
