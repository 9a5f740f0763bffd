"""Decoder-only language models calibrate as the oracle does, whatever their padding."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_identical, distance, run_fast, run_slow, settings_of
from oracle import Knobs, calibrate_slowly
from tiny_decoders import MAKES, NO_TARGET, decoder_model, decoder_suite, sentences
from tiny_models import Suite, modules_of, suite_of
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from fusion_bench_featcal import calibrate
from fusion_bench_featcal.engine.block import BlockSums
from fusion_bench_featcal.experts.safetensors_files import SafetensorsExpert

# RMS norms and rotary angles are computed in float32 inside models of any dtype, so runs that
# round differently anywhere part at that precision.
BOUND = 2e-6
TEXT = Knobs(alpha=0.15, lam=1e-3, rho=0.5, eps=1e-8)


def apart(found: nn.Module, wanted: nn.Module) -> float:
    return distance(found, wanted)


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
    assert apart(found, suite.merged) > 1e-3
    assert apart(found, run_slow(suite, TEXT).model) < BOUND
    assert apart(found, run_fast(suite, TEXT).model) < BOUND


@pytest.mark.parametrize("make", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("knobs", [PAPER, Knobs(alpha=1.0, lam=1.0, rho=1.0, bias=False)], ids=str)
def test_left_padding_equals_the_oracle(make: str, knobs: Knobs):
    suite = decoder_suite(make, side="left", seed=2)
    assert apart(run_fast(suite, knobs).model, run_slow(suite, knobs).model) < BOUND


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", ["llama", "qwen2"])
def test_target_rows_equal_the_oracle(make: str, side: str):
    suite = decoder_suite(make, side=side, seed=3)
    found = run_fast(suite, TEXT, decoder_rows="targets").model
    assert apart(found, slow_on_targets(suite, TEXT)) < BOUND
    assert apart(found, run_fast(suite, TEXT).model) > 1e-3


@pytest.mark.parametrize("rows", ["all", "targets"])
@pytest.mark.parametrize("make", ["llama", "mistral", "qwen2"])
def test_padding_changes_nothing(make: str, rows: str):
    found = run_fast(decoder_suite(make, seed=4), TEXT, decoder_rows=rows).model
    for side in ("left", "right"):
        padded = decoder_suite(make, side=side, extra=4, seed=4)
        assert apart(run_fast(padded, TEXT, decoder_rows=rows).model, found) < BOUND


def test_batches_of_any_length_give_the_same():
    suite, alone = decoder_suite(seed=5), decoder_suite(seed=5)
    for task, batches in suite.inputs.items():
        alone.inputs[task] = []
        for batch in batches:
            for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
                cut = {key: value[row : row + 1, :length] for key, value in batch.items()}
                alone.inputs[task].append(cut)
    assert len(alone.inputs["task_0"]) == 7
    assert apart(run_fast(alone, TEXT).model, run_fast(suite, TEXT).model) < BOUND


def test_labels_do_not_matter_where_all_rows_count():
    suite, without = decoder_suite(seed=6), decoder_suite(seed=6)
    for batch in (batch for batches in without.inputs.values() for batch in batches):
        del batch["labels"]
    assert_identical(run_fast(without, TEXT).model, run_fast(suite, TEXT).model)


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


def test_modules_with_one_input_share_a_statistic(monkeypatch: pytest.MonkeyPatch):
    groups: list[set[str]] = []
    add = BlockSums.add

    def spy(self: BlockSums, sums: Any, expert: nn.Module) -> None:
        groups.append({"+".join(n.rsplit(".", 1)[-1] for n in names) for names in sums.linear})
        add(self, sums, expert)

    monkeypatch.setattr(BlockSums, "add", spy)
    run_fast(decoder_suite(seed=9), TEXT)
    wanted = {"q_proj+k_proj+v_proj", "o_proj", "gate_proj+up_proj", "down_proj"}
    assert groups == [wanted] * 4  # two blocks, two tasks


@pytest.mark.parametrize("tied", [True, False])
def test_experts_stream_from_shards(tmp_path: Path, tied: bool):
    suite = decoder_suite(tied=tied, seed=10)
    sources = {}
    for task, expert in suite.experts.items():
        expert.save_pretrained(tmp_path / task, max_shard_size="20KB")  # type: ignore[operator]
        sources[task] = SafetensorsExpert(tmp_path / task)
        assert len(list((tmp_path / task).glob("*.safetensors"))) > 1
        assert ("lm_head.weight" in sources[task].names()) is not tied
    found = calibrate(
        suite.merged,
        suite.base,
        sources,
        suite.inputs,
        settings_of(TEXT, suite),
        progress=False,
    )
    assert_identical(found.model, run_fast(suite, TEXT).model)


def test_merged_model_is_not_changed():
    suite = decoder_suite(seed=11)
    before = copy.deepcopy(suite.merged)
    run_fast(suite, TEXT)
    assert_identical(suite.merged, before)


def gpt2_with_a_head() -> tuple[nn.Module, list[str]]:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config).eval(), ["transformer.h.0", "transformer.h.1"]


@pytest.mark.parametrize("make", ["gemma2", "gpt2"])
def test_replay_calibrates_what_has_another_shape(make: str):
    model, blocks = gpt2_with_a_head()
    if make == "gemma2":
        model, blocks = decoder_model(make), ["model.layers.0", "model.layers.1"]
    inputs: dict[str, list] = {
        f"task_{i}": [sentences([5, 9], 9, seed=i), sentences([3, 4, 2], 5, seed=10 + i)]
        for i in range(2)
    }
    suite = suite_of(model, inputs, blocks, seed=12)
    family = {"name": "replay", "blocks": [blocks[0].replace(".0", ".*")]}
    found = run_fast(suite, TEXT, family).model
    assert apart(found, run_slow(suite, TEXT).model) < BOUND
    assert apart(found, suite.merged) > 1e-3
