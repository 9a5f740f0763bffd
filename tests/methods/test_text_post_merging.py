"""Pools of language models: what is fitted, from which texts, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from text_pools import MAKERS, NORMS, text_pool, text_tokenizer, with_tests
from tiny_pools import inputs_of
from tiny_texts import TASKS, sentences, with_data, word_tokenizer, write
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.text_samples import TextEncoder
from fusion_bench_featcal.lab.rivals import (
    ProbSurgery,
    RidgeSurgery,
    RidgeSurgeryAlgorithm,
    Surgery,
    SurgeryAlgorithm,
    SurgeryV2Algorithm,
)
from fusion_bench_featcal.lab.rivals.corrected_language_model import CorrectedLanguageModel
from fusion_bench_featcal.lab.rivals.final_features import FinalStates
from fusion_bench_featcal.pools import CausalLMPool
from fusion_bench_featcal.tasks import TextTaskPool
from fusion_bench_featcal.tasks.text_generation import greedy_answers

KINDS = pytest.mark.parametrize("kind", list(MAKERS))
SHORT: dict[str, Any] = {"samples_per_task": 8, "batch_size": 4, "generated_tokens": 4}
METHODS: dict[str, Any] = {
    "surgery": Surgery(**SHORT, steps=5),
    "prob_surgery": ProbSurgery(**SHORT, steps=5, hidden=5),
    "ridge_surgery": RidgeSurgery(**SHORT),
}


@pytest.fixture(scope="module", params=list(MAKERS))
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def pool(kind, tmp_path_factory):
    return text_pool(kind, tmp_path_factory.mktemp(kind))


def fitted(pool: Any, method: Any, merged: Any = None) -> Any:
    merged = pool.load_model("_pretrained_") if merged is None else merged
    return method.post_merge(merged, inputs_of(pool))


def states_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.corrections.state_dict().items()}


def same(one: Any, two: Any) -> bool:
    ours, theirs = states_of(one), states_of(two)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_gives_one_correction_a_task(pool, kind, method):
    model = fitted(pool, method)
    assert isinstance(model, CorrectedLanguageModel)
    assert model.tasks == TASKS and model.final_norm == NORMS[kind]
    split = "test" if method.stream == "test_tta" else "train"
    assert model.samples == {task: {"samples": 8, "split": split} for task in TASKS}
    assert bool(model.curves) == (method.name != "ridge_surgery")


def test_token_ids_that_models_lack_name_task_and_item(pool, kind):
    rows = [{"input_ids": [3, 4, 5], "labels": [-100, 5, 3]}] * 4
    rows += [{"input_ids": [3, 9999, 4], "labels": [-100, 5, 3]}]
    broken = with_data(copy.copy(pool), lambda _: rows)
    method = RidgeSurgery(samples_per_task=5, batch_size=2, stream="calibration")
    with pytest.raises(CalibrationError, match=r"task 'one', .*item 4: input_ids has .* id 9999"):
        fitted(broken, method)


class _Drifting(nn.Module):
    """A norm whose output drifts in two directions."""

    def __init__(self, norm: nn.Module, size: float) -> None:
        super().__init__()
        self.norm = norm
        generator = torch.Generator().manual_seed(3)
        self.drift = nn.Parameter(
            size * torch.randn(8, 2, generator=generator) @ torch.randn(2, 8, generator=generator)
        )

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = self.norm(states)
        return normed + normed @ self.drift


def test_planted_drift_is_removed(pool, kind):
    expert = pool.load_model("one")
    merged = copy.deepcopy(expert)
    parent, _, name = NORMS[kind].rpartition(".")
    owner = merged.get_submodule(parent)
    setattr(owner, name, _Drifting(getattr(owner, name), 0.1))
    alone = copy.copy(pool)
    alone._models = {n: m for n, m in pool._models.items() if n in ("_pretrained_", "one")}
    method = RidgeSurgery(samples_per_task=12, ridge_lambda=1e-10)
    model = fitted(alone, method, merged)
    site = FinalStates(NORMS[kind])
    (batch,) = method.batches(inputs_of(alone))["one"]
    with torch.no_grad():
        target, drifted = (site.features(side, batch) for side in (expert, merged))
        remaining = (model.correct(drifted, "one") - target).abs().mean()
    assert remaining < 0.01 * (drifted - target).abs().mean()


def test_test_stream_learns_from_the_experts_own_answers(pool, kind):
    tokenizer = text_tokenizer(kind)
    stream = METHODS["surgery"].batches(inputs_of(pool))["two"]
    expert = pool.load_model("two").eval()
    encoder = TextEncoder(tokenizer, kind)
    rows = [stream.rows[index] for index in stream.indices]
    prompts = [encoder.prompt(row, "row", 4) for row in rows]
    answers = greedy_answers(expert, prompts, encoder, 4)
    labels = [row[row >= 0].tolist() for batch in stream for row in batch["labels"]]
    assert labels == answers
    assert labels != [encoder.sample(row, "row").labels for row in rows]


def test_answers_of_the_test_split_are_never_read(pool, kind):
    """Other answers, or none at all, change nothing."""
    method = RidgeSurgery(**SHORT, stream="test_tta")
    known = fitted(pool, method)

    def without(task: str) -> list[dict[str, str]]:
        return [{"prompt": row["prompt"]} for row in sentences(task)]

    def others(task: str) -> list[dict[str, str]]:
        return [row | {"target": "t s r q"} for row in sentences(task)]

    for rows in (without, others):
        assert same(fitted(with_tests(copy.copy(pool), rows), method), known)


def test_calibration_stream_takes_labels_or_the_experts_answers(pool, kind):
    def others(task: str) -> list[dict[str, str]]:
        return [row | {"target": "t s"} for row in sentences(task)]

    changed = with_data(copy.copy(pool), others)
    for targets in ("labels", "generated"):
        method = RidgeSurgery(**SHORT, calibration_targets=targets)
        equal = same(fitted(pool, method), fitted(changed, method))
        assert equal == (targets == "generated")


def test_task_pool_tells_the_task(pool, kind):
    model = fitted(pool, METHODS["ridge_surgery"])
    taskpool = TextTaskPool(
        {task: sentences(task) for task in TASKS}, tokenizer=text_tokenizer(kind), batch_size=5
    )
    report = taskpool.evaluate(model)
    assert set(TASKS) <= set(report)
    plain = taskpool.evaluate(model.model)
    assert report["one"]["loss"] != plain["one"]["loss"]
    assert model.task is None
    other = TextTaskPool({"three": sentences("one")}, tokenizer=text_tokenizer(kind))
    with pytest.raises(CalibrationError, match=r"no feature correction for task 'three'"):
        other.evaluate(model)


def refusing(pool: Any) -> Any:
    pool = copy.copy(pool)
    pool.load_model = lambda *_, **__: pytest.fail("a model was loaded")
    return pool


def test_what_cannot_work_is_refused_before_a_model_is_loaded(pool, kind):
    base = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
    bad = refusing(pool)
    with pytest.raises(CalibrationError, match=r"normalize=pre is for CLIP"):
        SurgeryAlgorithm(base_method=base, normalize="pre").run(bad)
    with pytest.raises(CalibrationError, match=r"recompute=true is for CLIP.*=false"):
        SurgeryAlgorithm(base_method=base, recompute=True).run(bad)
    with pytest.raises(CalibrationError, match=r"has no ln_f: .*method\.final_norm"):
        RidgeSurgeryAlgorithm(base_method=base, final_norm="ln_f").run(bad)
    with pytest.raises(CalibrationError, match=r"surgery_v2 corrects CLIP vision models, and"):
        SurgeryV2Algorithm(base_method=base).run(bad)
    nothing = with_tests(copy.copy(bad), sentences)
    nothing._test_datasets = None
    with pytest.raises(CalibrationError, match=r"no data for method\.stream=test_tta"):
        SurgeryAlgorithm(base_method=base).run(nothing)


def test_texts_without_targets_are_refused_for_the_calibration_stream(tmp_path):
    def without(task: str) -> list[dict[str, str]]:
        return [{"prompt": row["prompt"]} for row in sentences(task)]

    pool = with_data(text_pool("causal", tmp_path), without)
    with pytest.raises(CalibrationError, match=r"task one: texts have no targets.*generated"):
        fitted(pool, METHODS["ridge_surgery"])


def test_experts_that_answer_nothing_are_named(pool, kind, monkeypatch):
    from fusion_bench_featcal import calibration_text

    monkeypatch.setattr(calibration_text, "greedy_answers", lambda m, p, e, n: [[] for _ in p])
    with pytest.raises(CalibrationError, match=r"task '?one'?: .*target"):
        fitted(pool, METHODS["surgery"])


def test_other_architectures_name_their_norm(tmp_path):
    paths = {}
    for seed, name in enumerate(("_pretrained_", *TASKS)):
        torch.manual_seed(seed)
        config = GPT2Config(vocab_size=23, n_embd=8, n_layer=1, n_head=2, n_positions=32)
        paths[name] = write(GPT2LMHeadModel(config), tmp_path / name)
    pool: Any = with_data(CausalLMPool(paths, tokenizer=word_tokenizer()))
    with pytest.raises(CalibrationError, match=r"has no decoder\.final_layer_norm or model\.norm"):
        METHODS["ridge_surgery"].check(inputs_of(pool))
    method = RidgeSurgery(**SHORT, final_norm="transformer.ln_f")
    model = fitted(pool, method, AutoModelForCausalLM.from_pretrained(paths["one"]))
    assert model.tasks == TASKS
