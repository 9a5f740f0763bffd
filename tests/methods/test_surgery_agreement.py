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
from tiny_pools import TASKS, cpu_fabric, tiny_pool, tiny_processor
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal.methods import SurgerySettings
from fusion_bench_featcal.methods.feature_correction import all_features, open_stream
from fusion_bench_featcal.methods.projection import ProjectedFeatures, load_projection
from fusion_bench_featcal.methods.surgery import SurgeryModule, initial_surgery, train_surgery
from fusion_bench_featcal.methods.training import shuffled_batches, task_generator

STEPS = 6
SETTINGS = SurgerySettings(steps=STEPS, batch_size=4, normalize="pre", learning_rate=1e-3)
CPU = torch.device("cpu")


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
    """Their merged model, initial modules, and modules after every step, with the batches used."""
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
    pixels = stream(pool, models)
    positions = {
        task: list(shuffled_batches(10, 4, STEPS, task_generator(3, task, "any"))) for task in TASKS
    }
    loaders = {
        task: iter([(pixels[task][rows], None) for rows in positions[task]]) for task in TASKS
    }
    algorithm = their_algorithm(config, models, loaders)
    states = []
    build = theirs.SurgeryModelWrapper

    def build_and_keep(*args, **kwargs):
        wrapper = build(*args, **kwargs)
        states.append(copy.deepcopy(wrapper))
        return wrapper

    monkeypatch.setattr(theirs, "SurgeryModelWrapper", build_and_keep)
    algorithm._program = SimpleNamespace(
        taskpool=None,
        evaluate_merged_model=lambda _, model: states.append(copy.deepcopy(model.module)),
    )
    merged = algorithm.run(pool)["adamerging"]
    return SimpleNamespace(merged=merged, states=states, pixels=pixels, positions=positions)


def stream(pool, models):
    """All test pictures of each task, as pixels."""
    settings = SurgerySettings(batch_size=4)
    batches = open_stream(pool, settings, tiny_processor(models))
    return {task: torch.cat([b["pixel_values"] for b in batches[task]]) for task in TASKS}


def theirs_as_ours(wrapper, task: str) -> SurgeryModule:
    down, up = (getattr(wrapper, name).weight.detach().clone() for name in module_names(task))
    return SurgeryModule(down, up)


def test_every_step_agrees_with_fusion_bench(models, their_run):
    assert len(their_run.states) == STEPS + 1
    projection = load_projection(tiny_pool(models), None)
    for task in TASKS:
        batches = [{"pixel_values": their_run.pixels[task]}]
        expert = CLIPVisionModel.from_pretrained(models[task])
        merged_features, expert_features = (
            all_features(model, ProjectedFeatures(projection), batches, normalize="pre", device=CPU)
            for model in (their_run.merged, expert)
        )
        known = [theirs_as_ours(state, task) for state in their_run.states]
        module = theirs_as_ours(their_run.states[0], task)
        steps = []
        train_surgery(
            merged_features,
            expert_features,
            SETTINGS,
            initial=module,
            batches=their_run.positions[task],
            on_step=lambda *_: steps.append(copy.deepcopy(module.state_dict())),  # noqa: B023
        )
        for state, after in zip(steps, known[1:], strict=True):
            for name, value in after.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-6)
        assert known[-1].up.abs().max() > 1e-3


@pytest.mark.parametrize("normalize", ["none", "pre"])
def test_features_computed_once_train_as_on_the_fly(models, normalize):
    settings = SurgerySettings(steps=8, batch_size=4, normalize=normalize, rank=3)
    task, pool = TASKS[0], tiny_pool(models)
    pixels, projection = stream(pool, models)[task], load_projection(pool, None)
    merged, expert = (
        CLIPVisionModel.from_pretrained(models[name]).eval() for name in ("_merged_", task)
    )

    def features(model, images):
        site, batches = ProjectedFeatures(projection), [{"pixel_values": images}]
        return all_features(model, site, batches, normalize=normalize, device=CPU)

    known = initial_surgery(projection.out_features, settings, task)
    optimizer = torch.optim.Adam(known.parameters(), lr=settings.learning_rate)
    generator = task_generator(settings.seed, task, "batches")
    for rows in shuffled_batches(len(pixels), 4, 8, generator):
        corrected = known(features(merged, pixels[rows]))
        loss = (corrected - features(expert, pixels[rows])).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    once = train_surgery(features(merged, pixels), features(expert, pixels), settings, task=task)
    for name, value in known.state_dict().items():
        torch.testing.assert_close(once.state_dict()[name], value, rtol=1e-4, atol=2e-6)
