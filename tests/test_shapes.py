"""Estimates of a calibration from a model's config.json."""

import json
from pathlib import Path

import pytest
import transformers
from reports import error_of, featcal


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
