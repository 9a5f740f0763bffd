"""Estimates of a calibration from a model's config.json."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import transformers
from reports import error_of, featcal
from tiny_languages import NEEDS_RELEASE_5

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
    assert (paper["passes"], plus["passes"]) == (3 * passes, 6 * passes)  # 1 + 4 + 1 in place of 3
    moments = sum(n * w * w + 2 * n * w * min(w, outputs) for n, w, outputs in GROUPS)
    solves = sum(w**3 / 3 + 2 * w * w * outputs for _, w, outputs in GROUPS)
    sums = [2 * 4 * w * (w + outputs) for _, w, outputs in GROUPS]
    assert (paper["moments"], paper["sums"]) == (3 * rows * moments, sum(sums))
    assert (plus["moments"], plus["sums"]) == (2 * 3 * rows * moments, 2 * max(sums))
    features = 2 * rows * (2 * TOKENS * 32 + sum(n * w for n, w, _ in GROUPS))
    for estimate in (paper, plus):
        assert (estimate["features"], estimate["weights"]) == (features, 2 * 2 * (block + 2 * 32))
        assert estimate["solves"] == pytest.approx(3 * solves)


def test_the_command_prints_both_rules(tmp_path: Path):
    words = ["plan", "--shapes", str(llama(tmp_path)), "--tasks", "2", "--tokens", "8"]
    text, values = featcal(*words).out, json.loads(featcal(*words, "--json").out)
    assert "forward passes" in text
    assert values["FeatCal+"]["passes"] > values["FeatCal"]["passes"] > 0
    assert "leave out method=featcal" in error_of(*words, "method=featcal")
    wrong = featcal(*words, "--samples", "0")
    assert (wrong.code, "'0' is not an integer >= 1" in wrong.err) == (2, True)
    assert "needs the words of a run, or --shapes" in error_of("plan")
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
    solves = sum(n * (w**3 / 3 + 2 * w * w * outputs) for w, outputs, n in every)
    assert plus.solves == pytest.approx(3 * solves)
    assert plus.sums == 2 * max(2 * 4 * w * (w + outputs) for w, outputs, _ in every)
    assert plus.passes == 2 * SAMPLES * sum(shapes.passes.values()) * (2 + 2 + 1)
