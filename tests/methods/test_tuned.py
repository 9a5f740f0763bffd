"""Settings chosen on held-out samples: which samples, by what score, and what the model says."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from text_pools import NORMS, text_pool
from tiny_pools import TASKS, inputs_of, tiny_pool
from tiny_texts import sentences, with_data
from torch import Tensor
from transformers import CLIPModel, CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.calibration_data import draw_samples
from fusion_bench_featcal.lab.rivals import RegMean, RidgeSurgery, Tuned, TunedMergerAlgorithm
from fusion_bench_featcal.lab.rivals.final_features import FinalStates
from fusion_bench_featcal.lab.rivals.interface import Choice
from fusion_bench_featcal.lab.rivals.tuned import held_out_lessons, score

OWN = "fusion_bench_featcal.lab.rivals."
RIDGE: dict[str, Any] = {"_target_": f"{OWN}RidgeSurgery", "batch_size": 4, "ridge_lambda": 1e3}
STRENGTHS = [{"ridge_lambda": 1.0}, {"ridge_lambda": 1e-2}]
DRAW: dict[str, Any] = {"samples_per_task": 20}


def tuned(**changes: Any) -> Tuned:
    of = RIDGE | DRAW | changes.pop("of", {})
    return Tuned(**{"of": of, "candidates": STRENGTHS, **DRAW, **changes})


def pixels_of(pool: Any, task: str, indices: list[int]) -> Tensor:
    rows, processor = pool.load_train_dataset(task), pool.load_processor()
    images = [rows[index]["image"] for index in indices]
    return processor(images=images, return_tensors="pt")["pixel_values"]


@torch.no_grad()
def score_by_hand(models: Any, pool: Any, model: Any, indices: dict[str, list[int]]) -> float:
    """Mean over tasks of the mean cosine of projected features, written out."""
    projection = CLIPModel.from_pretrained(models["_pretrained_"]).visual_projection
    scores = []
    for task in TASKS:
        pixels = pixels_of(pool, task, indices[task])
        expert: Any = CLIPVisionModel.from_pretrained(models[task])
        target = projection(expert(pixels).pooler_output)
        found = model.features(task, pixels)
        cosines = (found * target).sum(1) / found.norm(dim=1) / target.norm(dim=1)
        scores.append(float(cosines.mean()))
    return sum(scores) / len(scores)


def test_the_best_on_a_held_out_quarter_is_fitted_on_all(models) -> None:
    pool = tiny_pool(models, train=30)
    merged = CLIPVisionModel.from_pretrained(models["_merged_"])
    found: Any = tuned().post_merge(copy.deepcopy(merged), inputs_of(pool))
    held = {task: draw_samples(30, task, FeatCalSettings(**DRAW))[15:] for task in TASKS}
    scores = {}
    for strength in (1e3, 1.0, 1e-2):
        method = RidgeSurgery(ridge_lambda=strength, samples_per_task=15, batch_size=4)
        model = method.post_merge(copy.deepcopy(merged), inputs_of(pool))
        scores[strength] = score_by_hand(models, pool, model, held)
    best = max(scores, key=lambda strength: scores[strength])
    assert best != 1e3 and len(set(scores.values())) == 3
    assert found.choice == Choice(3, f"ridge_lambda={best}")
    whole = RidgeSurgery(ridge_lambda=best, samples_per_task=20, batch_size=4)
    known: Any = whole.post_merge(merged, inputs_of(pool))
    for name, value in known.corrections.state_dict().items():
        assert torch.equal(found.corrections.state_dict()[name], value)
    assert found.samples["one"] == {"samples": 20, "split": "train"}


def test_settings_stay_as_given_where_samples_are_few(models, caplog) -> None:
    caplog.set_level("INFO")
    pool = tiny_pool(models, train=15)
    merged = CLIPVisionModel.from_pretrained(models["_merged_"])
    method = tuned()
    found: Any = method.post_merge(copy.deepcopy(merged), inputs_of(pool))
    assert found.choice == Choice(1, "as given")
    assert "15 samples per task: too few" in caplog.text
    known: Any = RidgeSurgery(ridge_lambda=1e3, samples_per_task=20, batch_size=4)
    known = known.post_merge(merged, inputs_of(pool))
    assert torch.equal(found.corrections["task_one"].matrix, known.corrections["task_one"].matrix)
    assert method.added(found) == found.added()
    assert method.samples(found, TASKS) == known.samples


@pytest.mark.parametrize("kind", list(NORMS))
def test_texts_are_scored_where_they_answer(kind, tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    pool = with_data(text_pool(kind, tmp_path), lambda task: sentences(task, 30))
    of = RIDGE | DRAW | {"stream": "calibration"}
    candidates = [{"normalize": "pre"}, {"ridge_lambda": 1.0}]
    method = Tuned(of=of, candidates=candidates, **DRAW)
    found: Any = method.post_merge(pool.load_model("_pretrained_"), inputs_of(pool))
    assert found.choice == Choice(2, "ridge_lambda=1.0")
    assert "{'normalize': 'pre'} is left out" in caplog.text
    draw = FeatCalSettings(**DRAW)
    scores = []
    for task, drawn in inputs_of(pool).batches(draw).items():
        site, cosines = FinalStates(NORMS[kind]), []
        for batch in replace(drawn, indices=drawn.indices[15:]):
            with torch.no_grad():
                states = found.correct(site.features(found.model, batch), task)
                wanted = site.features(pool.load_model(task), batch)
            cosines.append(torch.cosine_similarity(states, wanted, dim=-1))
        scores.append(float(torch.cat(cosines).mean()))
    lessons = held_out_lessons(inputs_of(pool), draw, 15)
    assert score(found, lessons) == pytest.approx(sum(scores) / len(scores), rel=1e-5)


def test_mergers_are_chosen_by_their_own_features(models) -> None:
    pool = tiny_pool({name: models[name] for name in ("_pretrained_", *TASKS)}, train=30)
    of = {"_target_": f"{OWN}RegMeanAlgorithm", "batch_size": 4, **DRAW}
    candidates = [{"off_diagonal": 0.0}, {"off_diagonal": 1.0}]
    algorithm = TunedMergerAlgorithm(of=of, candidates=candidates, **DRAW)
    found: Any = algorithm.run(pool)
    held = {task: draw_samples(30, task, FeatCalSettings(**DRAW))[15:] for task in TASKS}
    scores = {}
    for kept in (0.95, 0.0, 1.0):
        merger = RegMean(off_diagonal=kept, samples_per_task=15, batch_size=4)
        model: Any = merger.merge(inputs_of(pool))
        cosines = []
        for task in TASKS:
            pixels = pixels_of(pool, task, held[task])
            expert: Any = CLIPVisionModel.from_pretrained(models[task])
            with torch.no_grad():
                sides = [m(pixels).pooler_output for m in (model, expert)]
            cosines.append(float(torch.cosine_similarity(*sides).mean()))
        scores[kept] = sum(cosines) / 2
    best = max(scores, key=lambda kept: scores[kept])
    chosen = "as given" if best == 0.95 else f"off_diagonal={best}"
    assert found.choice == Choice(3, chosen)
    known = RegMean(off_diagonal=best, samples_per_task=20, batch_size=4).merge(inputs_of(pool))
    for name, value in known.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


def test_the_draw_is_the_same_whatever_the_method_says(models) -> None:
    """Else held-out samples would be fitted."""
    pool = tiny_pool(models, train=30)
    merged = CLIPVisionModel.from_pretrained(models["_merged_"])
    of = {"seed": 7, "samples_per_task": 29}
    found: Any = tuned(of=of).post_merge(copy.deepcopy(merged), inputs_of(pool))
    known: Any = tuned().post_merge(copy.deepcopy(merged), inputs_of(pool))
    matrices = [model.corrections["task_one"].matrix for model in (found, known)]
    assert torch.equal(*matrices) and found.choice == known.choice
    of = {"_target_": f"{OWN}RegMeanAlgorithm", "batch_size": 4}  # its own draw is all of them
    candidates = [{"off_diagonal": 0.0}, {"off_diagonal": 1.0}]
    bare, same = (
        TunedMergerAlgorithm(of=config, candidates=candidates, **DRAW).run(
            tiny_pool({name: models[name] for name in ("_pretrained_", *TASKS)}, train=30)
        )
        for config in (of, of | DRAW)
    )
    for name, value in same.state_dict().items():
        assert torch.equal(bare.state_dict()[name], value)


def test_what_a_data_free_method_was_chosen_on_is_told(models) -> None:
    pool = tiny_pool(models, train=30)
    method = Tuned(of={"_target_": f"{OWN}AnchorOnly"}, candidates=[{"anchor_rho": 1.5}], **DRAW)
    found = method.post_merge(CLIPVisionModel.from_pretrained(models["_merged_"]), inputs_of(pool))
    assert method.samples(found, TASKS)["one"] == {"samples": 20, "split": "train"}
    assert method.added(found) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidates": []}, "a list of settings to try besides"),
        ({"candidates": [{}]}, "a list of settings to try besides"),
        ({"of": {"_target_": None}}, "method.of must be the config of a method"),
        ({"candidates": [{"ridge_lamda": 1}]}, r"candidate \{'ridge_lamda': 1\}: .*'ridge_lambda'"),
        ({"candidates": [{"ridge_lambda": -1}]}, "ridge_lambda must be"),
        ({"of": {"stream": "test_tta"}}, "set stream=calibration"),
        ({"candidates": [{"seed": 3}]}, r"\['seed'\] say which samples are drawn"),
        ({"seed": -1}, "method.seed must be"),
    ],
)
def test_what_cannot_be_searched_is_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        tuned(**changes)


def test_the_settings_as_given_must_fit(models) -> None:
    method = tuned(of={"clip_model": None})
    with pytest.raises(CalibrationError, match="no data"):
        method.check(inputs_of(tiny_pool(models, train=0)))
