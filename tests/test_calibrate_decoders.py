"""Decoder-only language models calibrate as the oracle does, whatever their padding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_identical, assert_same, distance, replay, run_fast, run_slow
from oracle import Knobs
from tiny_models import MAKES, ROUNDING, decoder_suite

from fusion_bench_featcal import SafetensorsExpert

TEXT = Knobs(alpha=0.15, lam=1e-3, rho=0.5, eps=1e-8)
# One make of each arrangement of norms and projections; test-newest runs all of them.
EACH_TIME = ("llama", "qwen3", "gemma2", "phi3")


@pytest.mark.parametrize(
    "make",
    [make if make in EACH_TIME else pytest.param(make, marks=pytest.mark.slow) for make in MAKES],
)
def test_every_make_equals_the_oracle_and_replay(make: str):
    suite = decoder_suite(make, seed=1)
    found = run_fast(suite, TEXT).model
    assert distance(found, suite.merged) > 1e-3
    assert_same(found, run_slow(suite, TEXT).model, ROUNDING)
    assert_same(found, run_fast(suite, TEXT, replay(suite)).model, ROUNDING)


OTHER = Knobs(alpha=1.0, lam=1.0, rho=1.0, bias=False)


@pytest.mark.parametrize(
    ("make", "side", "rows", "knobs"),
    [
        ("mistral", "left", "all", PAPER),
        ("qwen2", "left", "all", OTHER),
        ("llama", "left", "targets", TEXT),
        ("qwen2", "right", "targets", TEXT),
    ],
)
def test_rows_that_count_are_the_oracles_on_either_side(
    make: str, side: str, rows: str, knobs: Knobs
):
    suite = decoder_suite(make, side=side, seed=3)
    found = run_fast(suite, knobs, decoder_rows=rows).model
    assert_same(found, run_slow(suite, knobs, decoder_rows=rows).model, ROUNDING)
    if rows == "targets":
        assert distance(found, run_fast(suite, knobs).model) > 1e-3
    for padded_side in ("left", "right"):
        padded = decoder_suite(make, side=padded_side, extra=4, seed=3)
        assert_same(run_fast(padded, knobs, decoder_rows=rows).model, found, ROUNDING)


def test_batches_of_any_length_give_the_same():
    suite, alone = decoder_suite(seed=5), decoder_suite(seed=5)
    for task, batches in suite.inputs.items():
        alone.inputs[task] = []
        for batch in batches:
            for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
                cut = {key: value[row : row + 1, :length] for key, value in batch.items()}
                alone.inputs[task].append(cut)
    assert len(alone.inputs["task_0"]) == 7
    assert_same(run_fast(alone, TEXT).model, run_fast(suite, TEXT).model, ROUNDING)


@pytest.mark.parametrize("tied", [True, False])
def test_only_linear_modules_of_the_blocks_change(tied: bool):
    suite = decoder_suite(tied=tied, seed=7)
    found: Any = run_fast(suite, TEXT).model
    merged = suite.merged.state_dict()
    changed = {name for name, value in found.state_dict().items() if (value != merged[name]).any()}
    inner = [f"self_attn.{name}_proj" for name in "qkvo"]
    inner += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert changed == {f"{block}.{name}.weight" for block in suite.blocks for name in inner}
    head, embedding = found.get_output_embeddings(), found.get_input_embeddings()
    assert (head.weight is embedding.weight) is tied


def test_qwen2s_biases_are_calibrated_as_biases():
    suite = decoder_suite("qwen2", seed=8)
    merged = dict(suite.merged.named_parameters())

    def moved(**knobs: Any) -> set[str]:
        found = run_fast(suite, Knobs(lam=1e-3, **knobs)).model.named_parameters()
        return {n for n, p in found if n.endswith("bias") and not torch.equal(p, merged[n])}

    assert moved(bias=False) == set()
    assert moved() == {f"{b}.self_attn.{n}_proj.bias" for b in suite.blocks for n in "qkv"}


@pytest.mark.parametrize("tied", [True, False])
def test_experts_stream_from_shards(tmp_path: Path, tied: bool):
    suite = decoder_suite(tied=tied, seed=10)
    sources: dict[str, Any] = {}
    for task, expert in suite.experts.items():
        expert.save_pretrained(tmp_path / task, max_shard_size="20KB")  # type: ignore[operator]
        sources[task] = SafetensorsExpert(tmp_path / task)
        assert len(list((tmp_path / task).glob("*.safetensors"))) > 1
        assert ("lm_head.weight" in sources[task].names()) is not tied
    found = run_fast(replace(suite, experts=sources), TEXT)
    assert_identical(found.model, run_fast(suite, TEXT).model)
