"""Ours beside FusionBench's own Surgery, which always merges by AdaMerging's layer-wise weights."""

import copy
from types import SimpleNamespace
from typing import Any

import fusion_bench_featcal.compat  # noqa: F401

# isort: split
import pytest
import torch
from fusion_bench.method.surgery import clip_layer_wise_adamerging_surgery as theirs
from omegaconf import DictConfig
from tiny_pools import TASKS, cpu_fabric, inputs_of, tiny_pool
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal.fusionbench.pool_models import PoolModels
from fusion_bench_featcal.lab.rivals import Surgery
from fusion_bench_featcal.lab.rivals.corrected_model import SurgeryModule
from fusion_bench_featcal.lab.rivals.projection import ProjectedFeatures, load_projection
from fusion_bench_featcal.lab.rivals.training import (
    initial_surgery,
    shuffled_batches,
    task_generator,
)

STEPS = 6
OPTIONS: dict[str, Any] = {"batch_size": 4, "normalize": "pre", "learning_rate": 1e-3}


def module_names(task: str) -> tuple[str, str]:
    place = task.replace("-", "_").replace(".", "_")
    start = "feature_mapping_to_head"
    return f"{start}_down_proj_{place}", f"{start}_up_proj_{place}"


def their_algorithm(config, models, loaders) -> Any:
    """Their loop, on batches that the test hands over; no text heads, which it does not use."""
    algorithm: Any = theirs.CLIPLayerWiseAdaMergingSurgeryAlgorithm(DictConfig(config))
    algorithm._fabric_instance = cpu_fabric()
    algorithm.log_hyperparams = lambda *_: None
    algorithm.get_shuffled_test_loader_iter = loaders.__getitem__
    clip_model = CLIPModel.from_pretrained(models["_pretrained_"])

    def set_projection():
        algorithm.visual_projection = clip_model.visual_projection.requires_grad_(False)

    algorithm.on_test_time_adaptation_start = set_projection
    return algorithm


@pytest.fixture
def their_run(models, tmp_path, monkeypatch):
    """Their merged model, and modules after every step from our initial ones on our batches."""
    pool = tiny_pool({name: models[name] for name in ("_pretrained_", *TASKS)})
    base = CLIPVisionModel.from_pretrained(models["_pretrained_"])
    layers = sum(p.requires_grad for p in base.parameters())
    torch.save(torch.full((len(TASKS), layers), 0.3), tmp_path / "weights.pt")
    config = {
        "weights": str(tmp_path / "weights.pt"),
        "clamp_weights": False,
        "tie_weights": True,
        "strict": False,
        "surgery_steps": STEPS,
        "eval_iterations": 1,
    }
    pixels = stream(pool)
    loaders = {
        task: iter([(pixels[task][rows], None) for rows in our_batches(task, STEPS)])
        for task in TASKS
    }
    algorithm = their_algorithm(config, models, loaders)
    states = []
    build = theirs.SurgeryModelWrapper

    def build_and_keep(*args, **kwargs):
        wrapper = build(*args, **kwargs)
        for task in TASKS:
            down, up = (getattr(wrapper, name).weight for name in module_names(task))
            assert not up.any()
            down.data.copy_(our_initial(down.shape[1], task).down)
        return wrapper

    monkeypatch.setattr(theirs, "SurgeryModelWrapper", build_and_keep)
    algorithm._program = SimpleNamespace(
        taskpool=None,
        evaluate_merged_model=lambda _, model: states.append(copy.deepcopy(model.module)),
    )
    merged = algorithm.run(pool)["adamerging"]
    return SimpleNamespace(merged=merged, states=states, pixels=pixels)


def stream(pool):
    """All test pictures of each task, as pixels."""
    batches = Surgery(batch_size=4).batches(inputs_of(pool))
    return {task: torch.cat([b["pixel_values"] for b in batches[task]]) for task in TASKS}


def our_batches(task: str, steps: int) -> list[torch.Tensor]:
    generator = task_generator(Surgery.seed, task, "batches")
    return list(shuffled_batches(10, 4, steps, generator))


def our_initial(width: int, task: str, rank: int = Surgery.rank) -> SurgeryModule:
    return initial_surgery(width, rank, task_generator(Surgery.seed, task, "weights"))


def test_every_step_agrees_with_fusion_bench(models, their_run):
    assert len(their_run.states) == STEPS
    site = ProjectedFeatures(load_projection(PoolModels(tiny_pool(models)), None))
    for task in TASKS:
        expert = CLIPVisionModel.from_pretrained(models[task])
        merged_features, expert_features = (
            Surgery(**OPTIONS).features(
                model.eval(), site, {"pixel_values": their_run.pixels[task]}
            )
            for model in (their_run.merged, expert)
        )
        for step, state in enumerate(their_run.states, start=1):
            module = Surgery(**OPTIONS, steps=step).fit(merged_features, expert_features, task)
            known = [getattr(state, name).weight for name in module_names(task)]
            for value, wanted in zip((module.down, module.up), known, strict=True):
                torch.testing.assert_close(value, wanted, rtol=1e-4, atol=2e-6)
        assert getattr(their_run.states[-1], module_names(task)[1]).weight.abs().max() > 1e-3


@pytest.mark.parametrize("normalize", ["none", "pre"])
def test_features_computed_once_train_as_on_the_fly(models, normalize):
    method = Surgery(steps=8, batch_size=4, normalize=normalize, rank=3)
    task, pool = TASKS[0], tiny_pool(models)
    pixels, projection = stream(pool)[task], load_projection(PoolModels(pool), None)
    merged, expert = (
        CLIPVisionModel.from_pretrained(models[name]).eval() for name in ("_merged_", task)
    )

    def features(model, images):
        return method.features(model, ProjectedFeatures(projection), {"pixel_values": images})

    known = our_initial(projection.out_features, task, rank=3)
    optimizer = torch.optim.Adam(known.parameters(), lr=method.learning_rate)
    for rows in our_batches(task, 8):
        corrected = known(features(merged, pixels[rows]))
        loss = (corrected - features(expert, pixels[rows])).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    once = method.fit(features(merged, pixels), features(expert, pixels), task)
    for name, value in known.state_dict().items():
        torch.testing.assert_close(once.state_dict()[name], value, rtol=1e-4, atol=2e-6)
