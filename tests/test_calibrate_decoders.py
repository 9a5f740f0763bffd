"""Decoder-only language models calibrate as the oracle does, whatever their padding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_identical, distance, replay, run_fast, run_slow
from oracle import Knobs, calibrate_slowly
from tiny_decoders import MAKES, NO_TARGET, decoder_suite
from tiny_models import Suite, modules_of
from torch import Tensor, nn

from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert

# RMS norms and rotary angles are computed in float32 inside models of any dtype, so runs that
# round differently anywhere part at that precision.
BOUND = 2e-6
TEXT = Knobs(alpha=0.15, lam=1e-3, rho=0.5, eps=1e-8)


def target_rows(inputs: dict[str, list]) -> dict[str, list[Tensor]]:
    """Row weights of the positions before each target, written differently from the package."""
    found: dict[str, list[Tensor]] = {}
    for task, batches in inputs.items():
        found[task] = []
        for batch in batches:
            weights = torch.zeros_like(batch["labels"])
            for row, position in (batch["labels"] != NO_TARGET).nonzero().tolist():
                if position > 0 and batch["attention_mask"][row, position - 1]:
                    weights[row, position - 1] = 1
            found[task].append(weights)
    return found


def slow_on_targets(suite: Suite, knobs: Knobs) -> nn.Module:
    return calibrate_slowly(
        suite.merged,
        suite.base,
        suite.experts,
        suite.inputs,
        suite.blocks,
        modules_of(suite.merged, suite.blocks),
        knobs,
        target_rows(suite.inputs),
    ).model


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
    assert distance(found, run_slow(suite, TEXT).model) < BOUND
    assert distance(found, run_fast(suite, TEXT, replay(suite)).model) < BOUND


@pytest.mark.parametrize("make", ["mistral", "qwen2"])
@pytest.mark.parametrize("knobs", [PAPER, Knobs(alpha=1.0, lam=1.0, rho=1.0, bias=False)], ids=str)
def test_left_padding_equals_the_oracle(make: str, knobs: Knobs):
    suite = decoder_suite(make, side="left", seed=2)
    assert distance(run_fast(suite, knobs).model, run_slow(suite, knobs).model) < BOUND


@pytest.mark.parametrize(("make", "side"), [("llama", "left"), ("qwen2", "right")])
def test_target_rows_equal_the_oracle(make: str, side: str):
    suite = decoder_suite(make, side=side, seed=3)
    found = run_fast(suite, TEXT, decoder_rows="targets").model
    assert distance(found, slow_on_targets(suite, TEXT)) < BOUND
    assert distance(found, run_fast(suite, TEXT).model) > 1e-3


@pytest.mark.parametrize(("make", "rows"), [("mistral", "all"), ("qwen2", "targets")])
def test_padding_changes_nothing(make: str, rows: str):
    found = run_fast(decoder_suite(make, seed=4), TEXT, decoder_rows=rows).model
    for side in ("left", "right"):
        padded = decoder_suite(make, side=side, extra=4, seed=4)
        assert distance(run_fast(padded, TEXT, decoder_rows=rows).model, found) < BOUND


def test_batches_of_any_length_give_the_same():
    suite, alone = decoder_suite(seed=5), decoder_suite(seed=5)
    for task, batches in suite.inputs.items():
        alone.inputs[task] = []
        for batch in batches:
            for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
                cut = {key: value[row : row + 1, :length] for key, value in batch.items()}
                alone.inputs[task].append(cut)
    assert len(alone.inputs["task_0"]) == 7
    assert distance(run_fast(alone, TEXT).model, run_fast(suite, TEXT).model) < BOUND


@pytest.mark.parametrize("tied", [True, False])
def test_only_linear_modules_of_the_blocks_change(tied: bool):
    suite = decoder_suite(tied=tied, seed=7)
    found = run_fast(suite, TEXT).model
    merged = suite.merged.state_dict()
    changed = {name for name, value in found.state_dict().items() if (value != merged[name]).any()}
    wanted = {
        f"{block}.{inner}.weight"
        for block in suite.blocks
        for inner in [f"self_attn.{name}_proj" for name in "qkvo"]
        + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    }
    assert changed == wanted
    head, embedding = found.get_output_embeddings(), found.get_input_embeddings()  # type: ignore
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
    sources = {}
    for task, expert in suite.experts.items():
        expert.save_pretrained(tmp_path / task, max_shard_size="20KB")  # type: ignore[operator]
        sources[task] = SafetensorsExpert(tmp_path / task)
        assert len(list((tmp_path / task).glob("*.safetensors"))) > 1
        assert ("lm_head.weight" in sources[task].names()) is not tied
    found = run_fast(replace(suite, experts=sources), TEXT)  # type: ignore[arg-type]
    assert_identical(found.model, run_fast(suite, TEXT).model)
