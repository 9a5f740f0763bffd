"""Estimates of a calibration from a model's config.json."""

import json
from pathlib import Path

import transformers
from reports import error_of, featcal

from fusion_bench_featcal.models.shapes import shapes_of


def llama(folder: Path) -> Path:
    """A folder with the config of a tiny Llama with key-value heads of a fourth of the width."""
    transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=1, vocab_size=50, dtype="bfloat16", tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    return folder


def test_shapes_are_those_of_the_model_and_its_pass(tmp_path: Path):
    tokens, shapes = 10, shapes_of(llama(tmp_path), tokens=10)
    block = 2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 48
    whole = 3 * (block + 2 * 32) + 2 * 50 * 32 + 32
    assert (shapes.parameters, shapes.block_bytes) == (whole, 2 * (block + 2 * 32))
    attention = 2 * 2 * tokens * tokens * 32  # queries with keys, and their shares with values
    assert {*shapes.passes.values()} == {2 * tokens * block + attention}
    groups = [(g.rows, g.width, g.outputs) for g in shapes.groups["model.layers.1"]]
    assert groups == [(tokens, 32, 48), (tokens, 32, 32), (tokens, 32, 96), (tokens, 48, 32)]
    assert shapes.feature_bytes == 2 * tokens * 32


def test_amounts_grow_with_tasks_samples_and_turns(tmp_path: Path):
    shapes = shapes_of(llama(tmp_path), tokens=10)
    few, more = (shapes.estimate(tasks=n, samples=4, plus=False) for n in (2, 3))
    plus = shapes.estimate(tasks=2, samples=4, plus=True)
    assert few.read == 3 * shapes.bytes < more.read
    assert (more.passes / few.passes, more.moments / few.moments) == (1.5, 1.5)
    assert (more.solves, more.sums) == (few.solves, few.sums)
    assert plus.passes == 2 * few.passes  # 1 + 4 + 1 passes to 1 + 1 + 1
    assert plus.features == few.features


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
