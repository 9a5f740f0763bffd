"""Modules that write to the hidden features, and those of which only rows that are read count."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, replay, run_fast
from plus_rows import is_linear
from test_plus_oracle import parallel_suite
from tiny_models import (
    Suite,
    clip_suite,
    decoder_suite,
    gpt2_suite,
    modules_of,
    suite_of,
    t5_suite,
)
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from tricky_models import in_place_residual, stack_suite, two_maps

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.engine import plus_rule
from fusion_bench_featcal.engine.module_groups import Group
from fusion_bench_featcal.engine.stream_writers import find_writers

LLAMA = {"self_attn.o_proj", "mlp.down_proj"}
NEOX = {"attention.dense", "mlp.dense_4h_to_h"}
SELF, CROSS = "SelfAttention.o", "EncDecAttention.o"


def writers_in(suite: Suite, block: str) -> set[str]:
    """Ends of the names of the modules found in a block."""
    model, batch = suite.merged, next(iter(suite.inputs.values()))[0]
    names = [name for name in modules_of(model, [block])[block] if is_linear(model, name)]
    assert len(names) > 1

    def run() -> None:
        with torch.no_grad():
            model(**batch) if isinstance(batch, dict) else model(batch)

    found = find_writers(model, block, names, run)
    assert find_writers(model, block, names, run) == found
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return {name.removeprefix(f"{block}.") for name in found}


MODELS: dict[str, tuple[Callable[[], Suite], set[str]]] = {
    "clip": (lambda: clip_suite(tasks=1), {"self_attn.out_proj", "mlp.fc2"}),
    "llama": (lambda: decoder_suite("llama"), LLAMA),
    "qwen2": (lambda: decoder_suite("qwen2"), LLAMA),
    "gemma2": (lambda: decoder_suite("gemma2"), set()),
    "olmo2": (lambda: decoder_suite("olmo2"), set()),
    "granite": (lambda: decoder_suite("granite"), set()),
    "gpt_neox": (lambda: parallel_suite("gpt_neox", seed=1), NEOX),
    "gpt_neox, serial": (
        lambda: parallel_suite("gpt_neox", seed=1, use_parallel_residual=False),
        NEOX,
    ),
    "cohere": (lambda: parallel_suite("cohere", seed=1), LLAMA),
    "phi": (lambda: parallel_suite("phi", seed=1), {"self_attn.dense", "mlp.fc2"}),
    "gpt2": (gpt2_suite, {"attn.c_proj", "mlp.c_proj"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_writers_of_transformers_models(name: str):
    make, wanted = MODELS[name]
    suite = make()
    for block in suite.blocks:
        assert writers_in(suite, block) == wanted


@pytest.mark.parametrize("gated", [True, False])
def test_writers_of_t5_on_both_sides(gated: bool):
    suite = t5_suite(gated=gated, depths=(1, 1))
    encoder, decoder = suite.blocks
    dense = "DenseReluDense.wo"
    assert writers_in(suite, encoder) == {f"layer.0.{SELF}", f"layer.1.{dense}"}
    wanted = {f"layer.0.{SELF}", f"layer.1.{CROSS}", f"layer.2.{dense}"}
    assert writers_in(suite, decoder) == wanted


Run = Callable[[Any, Tensor], Tensor]
BOTH, FIRST, NONE = {"first", "second"}, {"first"}, set[str]()


@two_maps
def in_place(block: Any, hidden: Tensor) -> Tensor:
    hidden = hidden + block.first(hidden)
    hidden += block.second(hidden.tanh())
    return hidden


@two_maps
def into_its_input(block: Any, hidden: Tensor) -> Tensor:
    hidden += block.first(hidden.clone())
    second = block.second(hidden.tanh())
    hidden += second
    return hidden


@two_maps
def not_in_place(block: Any, hidden: Tensor) -> Tensor:
    hidden = hidden + block.first(hidden)
    return hidden + block.second(hidden.tanh())


def after(second: Callable[[Any, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Blocks whose first map writes plainly, and whose second one does as it is told."""

    @two_maps
    def run(block: Any, hidden: Tensor) -> Tensor:
        return second(block, hidden + block.first(hidden))

    return run


BLOCKS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "in place": (in_place, BOTH),
    "the other way round": (after(lambda b, h: b.second(h) + h), BOTH),
    "torch.add": (after(lambda b, h: torch.add(h, b.second(h))), BOTH),
    "dropout": (after(lambda b, h: h + nn.functional.dropout(b.second(h), 0.5, False)), BOTH),
    "casts": (after(lambda b, h: h + b.second(h).contiguous().to(h.dtype).clone()), BOTH),
    "scaled": (after(lambda b, h: h + 0.5 * b.second(h)), FIRST),
    "scaled by alpha": (after(lambda b, h: torch.add(h, b.second(h), alpha=0.5)), FIRST),
    "added to each other": (after(lambda b, h: h + (b.second(h) + b.first(h)).tanh()), FIRST),
    "subtracted": (after(lambda b, h: h - b.second(h)), FIRST),
    "an activation behind": (after(lambda b, h: h + b.second(h).tanh()), FIRST),
    "a norm behind": (after(lambda b, h: h + nn.functional.layer_norm(b.second(h), [4])), FIRST),
    "the hidden features scaled": (after(lambda b, h: 2 * h + b.second(h)), FIRST),
    "of another shape": (after(lambda b, h: h + b.second(h.mean(0, keepdim=True))), FIRST),
    "beside the hidden features": (after(lambda b, h: h * (b.second(h) + 1)), FIRST),
    "of an expanded input": (after(lambda b, h: (h[None] + b.second(h))[0]), FIRST),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_writers_are_added_and_nothing_else(name: str):
    make, wanted = BLOCKS[name]
    suite = stack_suite(make)
    for block in suite.blocks:
        assert writers_in(suite, block) == wanted


def test_a_block_that_overwrites_what_its_modules_received():
    with pytest.raises(CalibrationError, match=r"layers\.0\.second: the block overwrites its in"):
        run_fast(stack_suite(in_place_residual), **PLUS)


@pytest.mark.parametrize("block", [in_place, into_its_input])
def test_sums_in_place_are_sums(block: Callable[[], nn.Module]):
    suite = stack_suite(block)
    other = stack_suite(not_in_place)
    assert_identical(run_fast(suite, **PLUS).model, run_fast(other, **PLUS).model)


def groups_seen(suite: Suite, monkeypatch: pytest.MonkeyPatch, **more: Any) -> dict[str, Any]:
    """The groups of every block, as a run finds them."""
    seen: dict[str, list[Group]] = {}
    find = plus_rule.find_groups

    def noted(problem: Any, block: str, batch: Any) -> list[Group]:
        seen[block] = find(problem, block, batch)
        return seen[block]

    with monkeypatch.context() as patch:
        patch.setattr(plus_rule, "find_groups", noted)
        run_fast(suite, **(PLUS | more))
    return seen


def ends(groups: list[Group]) -> list[list[str]]:
    return [[site.name.rpartition(".")[2] for site in group.sites] for group in groups]


def test_groups_of_clip_and_the_rows_that_its_last_block_is_read_by(monkeypatch):
    suite = clip_suite(tasks=1, sizes=(3,), depth=3, seed=1)
    seen = groups_seen(suite, monkeypatch)
    *before, last = suite.blocks
    for block in before:
        first, *others = ends(seen[block])
        assert sorted(first) == ["k_proj", "q_proj", "v_proj"]
        assert others == [["out_proj"], ["fc1"], ["fc2"]]
        assert not any(group.closing for group in seen[block])
    wanted = [["k_proj", "v_proj"], ["q_proj"], ["out_proj"], ["fc1"], ["fc2"]]
    assert sorted(map(sorted, ends(seen[last]))) == sorted(map(sorted, wanted))
    for group in seen[last]:
        assert group.closing == (group.first.rpartition(".")[2] not in ("k_proj", "v_proj"))
    for block in suite.blocks:
        writers = [group for group in seen[block] if group.writes]
        assert ends(writers) == [["out_proj"], ["fc2"]]
        assert [group.behind for group in writers] == [(), (writers[0].first,)]
        assert [group.closes for group in writers] == [False, True]


def test_no_row_is_left_out_without_a_class_token_or_of_other_families(monkeypatch):
    suite = clip_suite(tasks=1, sizes=(3,), seed=1)
    seen = groups_seen(suite, monkeypatch, family=replay(suite))
    assert not any(group.closing for groups in seen.values() for group in groups)
    config: Any = {"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 3, "image_size": 8, "patch_size": 4}
    torch.manual_seed(0)
    tower = SiglipVisionModel(SiglipVisionConfig(**config)).eval()
    blocks = [n for n, m in tower.named_modules() if type(m).__name__ == "SiglipEncoderLayer"]
    bare = suite_of(tower, suite.inputs, blocks, seed=1)
    seen = groups_seen(bare, monkeypatch, family="clip")
    assert len(seen) == 2
    for groups in seen.values():
        assert ends([group for group in groups if group.writes]) == [["out_proj"], ["fc2"]]
        assert not any(group.closing for group in groups)


def test_groups_without_residual_targets(monkeypatch):
    seen = groups_seen(clip_suite(tasks=1, sizes=(3,)), monkeypatch, target="module")
    assert not any(group.writes or group.behind for groups in seen.values() for group in groups)


def test_modules_apart_by_their_biases(monkeypatch):
    suite = decoder_suite("qwen2", tasks=1)  # q, k and v have biases, o has none
    biased = {
        bias: [group.biased for group in groups_seen(suite, monkeypatch, calibrate_bias=bias)[b]]
        for b in suite.blocks[:1]
        for bias in (True, False)
    }
    assert biased == {True: [True, False, False, False], False: [False] * 4}


def test_groups_of_a_block_whose_modules_run_in_another_order(monkeypatch):
    @two_maps
    def backwards(block: Any, hidden: Tensor) -> Tensor:
        return hidden + block.first(block.second(hidden).tanh())

    suite = stack_suite(backwards)
    seen = groups_seen(suite, monkeypatch)
    for block in suite.blocks:
        assert [group.first for group in seen[block]] == [f"{block}.second", f"{block}.first"]
        assert [group.writes for group in seen[block]] == [False, True]
