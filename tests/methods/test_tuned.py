"""Settings chosen on held-out samples: the samples, the score and the choice."""

import re
from typing import Any

import pytest
import torch
from calibrations import calls_of
from tiny_pools import TASKS, assert_equal, inputs_of, pixels_of, projection_of, tiny_pool, tower
from tiny_texts import NORMS, sentences, text_pool, with_data
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.lab.rivals import RegMean, RidgeSurgery, Tuned, TunedMergerAlgorithm

RIVALS = "fusion_bench_featcal.lab.rivals."
RIDGE: dict[str, Any] = {"_target_": f"{RIVALS}RidgeSurgery", "batch_size": 4, "ridge_lambda": 1e3}
DRAW: dict[str, Any] = {"samples_per_task": 20}
FITTED = 15
"""Three quarters of the samples. The others are held out."""


def tuned(**changes: Any) -> Tuned:
    of = RIDGE | DRAW | changes.pop("of", {})
    return Tuned(**{"of": of, "candidates": [{"ridge_lambda": 1e-2}], **DRAW, **changes})


def chosen(models: Any, method: Tuned, train: int = 30) -> Any:
    return method.post_merge(tower(models, "_merged_"), inputs_of(tiny_pool(models, train=train)))


def scores_in(text: str) -> list[float]:
    """Mean cosines of the candidates that a log names."""
    return [float(number) for number in re.findall(r"cosine (\S+) on held-out", text)]


def cosine(sides: Any) -> float:
    return float(torch.cosine_similarity(*sides, dim=-1).mean())


@torch.no_grad()
def score_by_hand(models: Any, pool: Any, model: Any) -> float:
    """Mean over tasks of the mean cosine of (corrected, projected) features on held-out samples."""
    scores, projection = [], projection_of(models)
    for task, batches in inputs_of(pool).batches(FeatCalSettings(**DRAW)).items():
        rows = pool.load_train_dataset(task)
        pixels = pixels_of(models, [rows[index] for index in batches.indices[FITTED:]])
        target = tower(models, task)(pixels).pooler_output
        if hasattr(model, "corrections"):
            scores.append(cosine((model.features(task, pixels), projection(target))))
        else:
            scores.append(cosine((model(pixels).pooler_output, target)))
    return sum(scores) / len(scores)


def assert_best(models: Any, pool: Any, model: Any, fitted: Any, values: Any, log: str) -> None:
    """The model is that of the value that scores best after a fit on three quarters."""
    by_hand = [score_by_hand(models, pool, fitted(value, FITTED)) for value in values]
    assert scores_in(log) == pytest.approx(by_hand, abs=1e-4)
    assert abs(by_hand[0] - by_hand[1]) > 1e-3
    best = by_hand.index(max(by_hand))
    assert model.choice.tried == 2 and (model.choice.chosen == "as given") == (best == 0)
    assert_equal(model, fitted(values[best], 20))


def test_the_best_correction_on_a_held_out_quarter_is_fitted_on_all(models, caplog) -> None:
    caplog.set_level("INFO")
    pool: Any = tiny_pool(models, train=30)

    def fitted(strength: float, samples: int) -> Any:
        method = RidgeSurgery(ridge_lambda=strength, samples_per_task=samples, batch_size=4)
        return method.post_merge(tower(models, "_merged_"), inputs_of(pool))

    # The draw is the same whatever the method says: else held-out samples would be fitted.
    model = chosen(models, tuned(of={"seed": 7, "samples_per_task": 29}))
    assert_best(models, pool, model, fitted, (1e3, 1e-2), caplog.text)
    assert model.choice.chosen == "ridge_lambda=0.01"
    assert model.samples["one"] == {"samples": 20, "split": "train"}
    model = chosen(models, tuned(), train=15)
    assert (model.choice.tried, model.choice.chosen) == (1, "as given")
    assert "15 samples per task: too few" in caplog.text


def test_the_best_merger_on_a_held_out_quarter_is_fitted_on_all(models, caplog) -> None:
    caplog.set_level("INFO")
    pool: Any = tiny_pool({name: models[name] for name in ("_pretrained_", *TASKS)}, train=30)

    def fitted(value: float, samples: int) -> Any:
        few: dict[str, Any] = {"samples_per_task": samples, "batch_size": 10}
        return RegMean(off_diagonal=value, **few).merge(inputs_of(pool))

    # its samples are all of the draw, of which some would be held out and fitted, too
    of = {"_target_": f"{RIVALS}RegMeanAlgorithm", "batch_size": 10, "off_diagonal": 0.9}
    model = TunedMergerAlgorithm(of=of, candidates=[{"off_diagonal": 0.0}], **DRAW).run(pool)
    assert_best(models, pool, model, fitted, (0.9, 0.0), caplog.text)


def answer_states(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """States behind the last norm that predict a target token."""
    ((_, states),) = calls_of(model, NORMS["seq2seq"], lambda: model(**batch))
    return states[batch["labels"] >= 0]


def test_texts_are_scored_where_they_answer(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    pool = with_data(text_pool("seq2seq", tmp_path), lambda task: sentences(task, 30))
    of = RIDGE | DRAW | {"stream": "calibration", "batch_size": 5}
    candidates = [{"normalize": "pre"}, {"ridge_lambda": 1.0}]
    method = Tuned(of=of, candidates=candidates, **DRAW)
    result: Any = method.post_merge(pool.load_model("_pretrained_"), inputs_of(pool))
    assert (result.choice.tried, result.choice.chosen) == (2, "ridge_lambda=1.0")
    assert "{'normalize': 'pre'} is left out" in caplog.text
    few = RidgeSurgery(ridge_lambda=1.0, samples_per_task=FITTED, batch_size=5)
    model: Any = few.post_merge(pool.load_model("_pretrained_"), inputs_of(pool))
    scores = []
    for task, batches in inputs_of(pool).batches(FeatCalSettings(**DRAW, batch_size=5)).items():
        expert, sides = pool.load_model(task).eval(), []
        for batch in list(batches)[3:]:  # batches of 5: the last is held out
            states = answer_states(model.model, batch)
            sides.append((model.correct(states, task), answer_states(expert, batch)))
        scores.append(cosine(map(torch.cat, zip(*sides, strict=True))))
    assert scores_in(caplog.text)[1] == pytest.approx(sum(scores) / 2, abs=1e-4)


def test_settings_that_cannot_be_searched_are_refused() -> None:
    with pytest.raises(ValueError, match=r"candidate \{'ridge_lamda': 1\}: .*'ridge_lambda'"):
        tuned(candidates=[{"ridge_lamda": 1}])
    with pytest.raises(ValueError, match="set stream=calibration"):
        tuned(of={"stream": "test_tta"})
