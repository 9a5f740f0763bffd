"""Training on answers: losses and updates beside a slow version, for both kinds of text models."""

import copy
from collections.abc import Callable
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from calibrations import gamma
from rivals import DRAW, applied, generator
from tiny_models import clip_suite
from tiny_pools import in_memory, inputs_of
from tiny_texts import text_pool
from torch import Tensor, nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.generation import GREEDY
from fusion_bench_featcal.lab import rivals

STEPS, RATE = 3, 1e-3


@pytest.fixture(scope="module")
def pool_of(tmp_path_factory: Any) -> Callable[[str], Any]:
    """Pool of a kind of language models, in float64."""

    @cache
    def make(kind: str) -> Any:
        pool = text_pool(kind, tmp_path_factory.mktemp(kind))
        load = pool.load_model
        pool.load_model = lambda *args, **options: load(*args, **options).double()
        return pool

    return make


def token_logits(model: Any, prompt: list[int], answer: list[int], kind: str) -> Tensor:
    """Logits that predict an answer's tokens, of one sample without padding."""
    if kind == "seq2seq":
        return model(input_ids=torch.tensor([prompt]), labels=torch.tensor([answer])).logits[0]
    whole = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    return whole[len(prompt) - 1 : -1]


def answer(model: Any, prompt: list[int], kind: str, most: int) -> list[int]:
    """The most probable token after the other, up to an end token."""
    written = list[int]()
    while len(written) < most and 1 not in written:
        if kind == "seq2seq":
            start = torch.tensor([[model.config.decoder_start_token_id, *written]])
            logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=start).logits
        else:
            logits = model(input_ids=torch.tensor([[*prompt, *written]])).logits
        written.append(int(logits[0, -1].argmax()))
    return written


def trained_by_hand(kind: str, pool: Any, method: Any) -> tuple[nn.Module, dict[str, list[float]]]:
    """Adam with a falling rate on the mean over tasks, sample by sample without padding."""
    inputs = inputs_of(pool)
    model = pool.load_model("_pretrained_").eval()
    experts = {task: pool.load_model(task).eval() for task in pool.model_names}
    batches = method.take_batches(inputs)
    prompts = {t: [[*map(int, p.ids)] for p in b.prompts] for t, b in batches.items()}
    orders = {}
    for task in experts:
        numbers = generator(method.seed, task, "batches")
        passes = [torch.randperm(2, generator=numbers) for _ in range(STEPS)]
        orders[task] = torch.cat(passes).tolist()
    adam = torch.optim.Adam(model.parameters(), RATE)
    losses: dict[str, list[float]] = {task: [] for task in experts}
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for task, expert in experts.items():
            start = 4 * orders[task][step]
            sums, count = torch.zeros((), dtype=torch.float64), 0
            for prompt in prompts[task][start : start + 4]:
                author = expert if method.name == "seqkd" else model
                with torch.no_grad():
                    words = answer(author, prompt, kind, method.generated_tokens)
                own = token_logits(model, prompt, words, kind).log_softmax(-1)
                if method.name == "seqkd":
                    sums = sums - own[range(len(words)), words].sum()
                else:
                    with torch.no_grad():
                        wanted = token_logits(expert, prompt, words, kind).log_softmax(-1)
                    sums = sums + (own.exp() * (own - wanted)).sum()
                count += len(words)
            losses[task].append(sums.item() / count)
            total = total + sums / count / len(experts)
        adam.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        adam.zero_grad()
        total.backward()
        adam.step()
    return model, losses


@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
@pytest.mark.parametrize("name", ["SeqKD", "MOPD"])
def test_it_trains_as_written_out(name, kind, pool_of, monkeypatch) -> None:
    """Sampled answers are replaced by greedy ones, which the slow version can repeat."""
    monkeypatch.setattr("fusion_bench_featcal.lab.rivals.answer_training.SAMPLING", GREEDY)
    pool = pool_of(kind)
    options = DRAW | {"steps": STEPS, "learning_rate": RATE, "generated_tokens": 3, "seed": 3}
    merged = pool.load_model("_pretrained_").eval()
    method, result = applied(name, inputs_of(pool), merged, **options)
    reference, losses = trained_by_hand(kind, pool, method)
    for task, curve in result.curves.items():  # a curve has six digits
        first, last = (pytest.approx(x, rel=5.1e-6) for x in (losses[task][0], mean(losses[task])))
        assert curve == [(0, first), (STEPS, last)]
    # Adam divides a gradient, a sum of hundreds of products, by its size plus 1e-8.
    bound = STEPS * RATE * gamma(1000, torch.float64) / 1e-8
    largest = 0.0
    for parameter_name, value in reference.named_parameters():
        parameter = result.model.get_parameter(parameter_name)
        torch.testing.assert_close(parameter, value, rtol=0, atol=bound)
        step = (value - merged.get_parameter(parameter_name)).detach()
        largest = max(largest, float(step.abs().max()))
    assert largest > RATE / 2


def test_sampled_answers_depend_on_the_seed_alone(pool_of) -> None:
    pool, curves = pool_of("causal"), []
    merged = pool.load_model("_pretrained_").eval()
    for seed, state in ((1, 7), (1, 8), (2, 7)):
        torch.manual_seed(state)
        before = torch.get_rng_state()
        options = DRAW | {"steps": 3, "seed": seed}
        curves.append(applied("MOPD", inputs_of(pool), copy.deepcopy(merged), **options)[1].curves)
        assert torch.equal(torch.get_rng_state(), before)
    assert curves[0] == curves[1] != curves[2]


@pytest.mark.parametrize("name", ["SeqKD", "MOPD"])
def test_models_that_write_no_answers_are_refused(name: str) -> None:
    with pytest.raises(
        CalibrationError, match=f"{name.lower()} trains only models that answer texts"
    ):
        getattr(rivals, name)().check(in_memory(clip_suite()))
