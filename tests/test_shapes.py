"""Estimates of a calibration from a model's config.json."""

import json
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from reports import error_of, featcal
from tiny_languages import NEEDS_RELEASE_5

from fusion_bench_featcal.models import fits
from fusion_bench_featcal.models.fits import BASELINE, CPU, GPU, fit_lines, peak_bytes
from fusion_bench_featcal.models.shapes import shapes_of


def llama(folder: Path) -> Path:
    """A folder with the config of a tiny Llama with key-value heads of a fourth of the width."""
    transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=50, dtype="bfloat16", tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


TOKENS, SAMPLES = 10, 4
# Rows, widths and outputs of the modules of a block that share an input.
GROUPS = [(TOKENS, 32, 48), (TOKENS, 32, 32), (TOKENS, 32, 96), (TOKENS, 48, 32)]


@pytest.mark.parametrize("tasks", [2, 3])
def test_amounts_are_those_of_the_model_and_its_pass(tasks: int, tmp_path: Path):
    counts = {"--tasks": tasks, "--tokens": TOKENS, "--samples": SAMPLES}
    options = [str(word) for pair in counts.items() for word in pair]
    done = featcal("plan", "--shapes", str(llama(tmp_path)), *options, "--json")
    paper, plus = json.loads(done.out).values()
    rows, block = tasks * SAMPLES, 2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 48
    whole = 3 * (block + 2 * 32) + 2 * 50 * 32 + 32
    copies = 1 if transformers.__version__[0] == "4" else 2
    size = 2 * whole + copies * 4 * 4  # with angles of rotary positions, in float32
    assert (paper["read"], plus["read"]) == ((tasks + 1) * size, (tasks + 2) * size)
    attention = 2 * 2 * TOKENS * TOKENS * 32  # queries with keys, and their shares with values
    passes = 3 * rows * (2 * TOKENS * block + attention)
    assert paper["passes"] == 3 * passes
    # Expert, update, and for each group what runs before it.
    weights = [w * outputs for _, w, outputs in GROUPS]
    turns = sum(sum(weights[:number]) for number in range(len(weights))) / sum(weights)
    assert plus["passes"] == pytest.approx((2 + turns) * passes)
    moments = 3 * rows * sum(n * w * w + 2 * n * w * w for n, w, _ in GROUPS)
    assert paper["moments"] == plus["moments"] == moments  # fitted or held out, never both
    squares = [(w * w, w * outputs) for _, w, outputs in GROUPS]
    assert paper["sums"] == 4 * sum(4 * square + 3 * weight for square, weight in squares)
    assert plus["sums"] == 4 * max(
        max(9 * square + 7 * weight, 7 * square + 9 * weight) for square, weight in squares
    )
    solves = sum(w**3 / 3 + 4 * w * w * outputs for _, w, outputs in GROUPS)
    assert paper["solves"] == pytest.approx(3 * solves)
    assert plus["solves"] == pytest.approx(3 * (solves + sum(7 * w**3 / 3 for _, w, _ in GROUPS)))
    waiting = sum(n * w for n, w, _ in GROUPS[1:])  # the expert's inputs of later groups
    between = 2 * rows * 2 * TOKENS * 32
    assert (paper["features"], plus["features"]) == (between, between + 2 * rows * waiting)
    assert paper["weights"] == plus["weights"] == 3 * 2 * (block + 2 * 32)


def test_time_is_proportional_to_samples_and_featcal_plus_needs_more_memory(tmp_path: Path):
    estimate = partial(shapes_of(llama(tmp_path), tokens=TOKENS).estimate, tasks=2)
    # Without the parts of weights, which do not depend on samples.
    fixed = {"read": 0, "targets": 0.0, "solves": 0.0}
    for plus in (False, True):
        once = replace(estimate(samples=64, plus=plus), **fixed)
        twice = replace(estimate(samples=128, plus=plus), **fixed)
        for rates in (CPU, GPU):
            assert rates.seconds(twice) == pytest.approx(2 * rates.seconds(once))
        assert twice.features == 2 * once.features
    peaks = [peak_bytes(estimate(samples=64, plus=plus)) for plus in (False, True)]
    assert BASELINE < peaks[0] < peaks[1]


def test_cards_that_are_too_small_are_not_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(fits, "free_bytes", lambda _: 16e9)
    estimate = shapes_of(llama(tmp_path), tokens=TOKENS).estimate(tasks=2, samples=4, plus=True)
    everywhere = "24 GB, 48 GB, 80 GB, this machine (16 GB free)"
    memory, time = fit_lines(estimate)
    assert memory == f"memory: about 0.6 GB at the peak, fits into {everywhere}"
    assert time.startswith("time: about ") and "(from assumed rates)" in time
    larger = replace(estimate, features=int(30e9))
    assert fit_lines(larger)[0] == "memory: about 30.6 GB at the peak, fits into 48 GB, 80 GB"
    largest = replace(estimate, features=int(90e9))
    assert fit_lines(largest)[0].endswith(f"fits into none of {everywhere}")


def test_the_command_prints_both_rules(tmp_path: Path):
    words = ["plan", "--shapes", str(llama(tmp_path)), "--tasks", "2", "--tokens", "8"]
    text, values = featcal(*words).out, json.loads(featcal(*words, "--json").out)
    assert "forward passes" in text
    for line in ("FeatCal:\nmemory: about ", "FeatCal+:\nmemory: about ", "\ntime: about "):
        assert line in text
    assert values["FeatCal+"]["passes"] > values["FeatCal"]["passes"] > 0
    assert "leave out method=featcal" in error_of(*words, "method=featcal")
    wrong = featcal(*words, "--samples", "0")
    assert (wrong.code, "'0' is not an integer >= 1" in wrong.err) == (2, True)
    assert "needs the arguments of a run, or --shapes" in error_of("plan")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "config.json" in error_of("plan", "--shapes", str(empty))


@NEEDS_RELEASE_5
def test_routed_experts_are_counted_and_solved_one_at_a_time(tmp_path: Path):
    width, inner, slots, top = 32, 20, 6, 2
    sizes: dict[str, Any] = {
        "hidden_size": width, "moe_intermediate_size": inner, "num_experts": slots, "head_dim": 8,
        "num_experts_per_tok": top, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 50, "architectures": ["Qwen3MoeForCausalLM"],
    }  # fmt: skip
    transformers.Qwen3MoeConfig(**sizes).save_pretrained(tmp_path)
    shapes = shapes_of(tmp_path, tokens=TOKENS)
    entry, exit = (TOKENS * top, width, 2 * inner), (TOKENS * top, inner, width)
    assert [*map(astuple, shapes.routed["model.layers.1"])] == [(*entry, slots), (*exit, slots)]
    attention = 2 * TOKENS * 4 * width * width + 4 * TOKENS * TOKENS * width
    products = TOKENS * (2 * slots * width + top * 2 * 3 * width * inner)
    assert shapes.passes["model.layers.1"] == attention + products
    plus = shapes.estimate(tasks=2, samples=SAMPLES, plus=True)
    module_shapes = [(TOKENS, width, 3 * width), (TOKENS, width, width)]
    every = [(w, outputs, 1) for _, w, outputs in module_shapes]
    every += [(w, outputs, slots) for _, w, outputs in (entry, exit)]
    solves = sum(n * (8 * w**3 / 3 + 4 * w * w * outputs) for w, outputs, n in every)
    assert plus.solves == pytest.approx(3 * solves)
    areas = [(w * w, w * outputs) for w, outputs, _ in every]
    assert plus.sums == 4 * max(
        max(9 * square + 7 * weight, 7 * square + 9 * weight) for square, weight in areas
    )
    # Expert, update, router, and the output projection after three of four products.
    assert plus.passes == 2 * SAMPLES * sum(shapes.passes.values()) * (2 + 0.75 + 1)
