"""T5 is calibrated as the oracle says, whatever its padding; what is no block's module stays."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, assert_same, distance, run_fast, run_slow, settings_of
from oracle import Knobs
from safetensors.torch import save_model
from tiny_models import REPLAY, ROUNDING, Suite, t5_suite, without_labels
from torch import Tensor, nn

from fusion_bench_featcal import InMemoryExpert, SafetensorsExpert
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.families import T5
from fusion_bench_featcal.plan_shapes import Request, Shapes

FLAN = Knobs(alpha=0.6, lam=1e-3, rho=2.0, norm=False)
CASES: list[tuple[dict[str, Any], Knobs]] = [
    ({"seed": 1, "untied": True}, PAPER),
    ({"seed": 2, "gated": False, "depths": (1, 3), "tasks": 3}, FLAN),
    ({"seed": 3, "kind": "mt5", "depths": (3, 1), "tasks": 1}, Knobs(alpha=1.0, lam=0.1, rho=0.5)),
    ({"seed": 4, "kind": "umt5"}, Knobs(alpha=0.0, lam=0.5, rho=1.0)),
]


@pytest.mark.parametrize(("shape", "knobs"), CASES, ids=lambda value: str(value)[:60])
def test_t5_equals_the_oracle_and_the_replay_family(shape: dict[str, Any], knobs: Knobs):
    suite = t5_suite(**shape)
    found, wanted = run_fast(suite, knobs).model, run_slow(suite, knobs).model
    assert distance(wanted, suite.merged) > 1e-3
    assert_same(found, wanted, ROUNDING)
    assert_same(run_fast(suite, knobs, REPLAY).model, found, ROUNDING)


def test_the_engine_shares_statistics_as_the_plan_says():
    suite, groups = t5_suite(), dict[tuple[str, float], list[str]]()
    for record in run_fast(suite).log.of_kind("module"):  # one system has one condition number
        groups.setdefault((record["block"], record["condition"]), []).append(record["module"])
    settings = settings_of(PAPER, suite)
    shapes = Shapes.of(Request(suite.merged.to("meta"), settings, 1))
    groups_of_all = [group for block in shapes.modules for group in shapes.groups(block)]
    wanted = [tuple(s.name for s in g.sites) for g in groups_of_all if g.kind == "linear"]
    assert [tuple(names) for names in groups.values()] == wanted
    cross = "decoder.block.0.layer.1.EncDecAttention"
    assert (f"{cross}.k", f"{cross}.v") in wanted


class Spy:
    """T5, noting what every decoder's first block receives from the encoder."""

    def __init__(self) -> None:
        self.fed: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(T5, name)

    def begin(self, model: nn.Module, inputs: Any, first_block: str, *earlier: Tensor) -> Any:
        call = T5.begin(model, inputs, first_block, *earlier)
        if first_block.startswith("decoder"):
            assert earlier  # the encoder does not run again
            self.fed.append(call.kwargs["encoder_hidden_states"])
        return call


def test_decoder_is_fed_by_the_calibrated_encoder_and_by_the_experts_own():
    suite, spy = t5_suite(seed=5, tasks=1), Spy()
    model = run_fast(suite, family=spy).model
    wanted = []
    for side in (model, suite.experts["task_0"]):
        for batch in map(without_labels, suite.inputs["task_0"]):
            with torch.no_grad():
                wanted.append(side.get_submodule("encoder")(**batch).last_hidden_state)
    assert len(spy.fed) == 4
    torch.testing.assert_close(spy.fed, wanted, rtol=0, atol=1e-6)


def filled_up(suite: Suite, *, encoder: str, decoder: str) -> Suite:
    """Three more positions of padding, holding arbitrary tokens, on the named sides."""

    def put(table: Tensor, fill: int, side: str) -> Tensor:
        filling = torch.full((len(table), 3), fill, dtype=table.dtype)
        return torch.cat([filling, table] if side == "left" else [table, filling], dim=1)

    def one(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if decoder == "left":  # shifting labels would start at the padding
            ids = batch["labels"].clamp(min=0).roll(1, dims=1)
            ids[:, 0] = 0
            given = {"decoder_input_ids": ids, "decoder_attention_mask": batch["labels"] >= 0}
            batch = batch | {name: value.long() for name, value in given.items()}
        filling = {"input_ids": (7, encoder), "attention_mask": (0, encoder)}
        filling |= {"labels": (-100, decoder), "decoder_input_ids": (9, decoder)}
        filling |= {"decoder_attention_mask": (0, decoder)}
        return {name: put(value, *filling[name]) for name, value in batch.items()}

    inputs = {task: [one(b) for b in batches] for task, batches in suite.inputs.items()}
    return replace(suite, inputs=inputs)


def unpadded(suite: Suite) -> Suite:
    """Every sample a batch of its own."""

    def alone(batch: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        for ids, mask, labels in zip(*batch.values(), strict=True):
            one = {"input_ids": ids[mask > 0], "labels": labels[labels >= 0]}
            one["attention_mask"] = torch.ones_like(one["input_ids"])
            yield {name: row[None] for name, row in one.items()}

    inputs = {t: [one for b in batches for one in alone(b)] for t, batches in suite.inputs.items()}
    return replace(suite, inputs=inputs)


@pytest.mark.parametrize(("encoder", "decoder"), [("left", "right"), ("right", "left")])
def test_padding_changes_nothing(encoder: str, decoder: str):
    batched = t5_suite(seed=6)
    suite = unpadded(batched)
    # transformers 4.57 masks with the dtype's smallest number, -inf in the softmax's float32: in
    # float64 a decoder's first rows, which see padding only, are NaN and spoil the rest
    bound = ROUNDING if decoder == "right" else 1e-4
    suite = suite if decoder == "right" else suite.to(torch.float32)
    wanted = run_fast(suite).model
    if decoder == "right":  # batches of unequal length are samples alone
        assert_same(run_fast(batched).model, wanted, bound)
    padded = filled_up(suite, encoder=encoder, decoder=decoder)
    assert distance(wanted, suite.merged) > 100 * bound
    assert_same(run_fast(padded).model, wanted, bound)


def test_targets_only_leave_the_decoders_other_positions_out():
    suite = t5_suite(seed=9)
    for batches in suite.inputs.values():
        for batch in batches:
            ids = batch["labels"].clamp(min=0)
            batch |= {"decoder_input_ids": ids, "decoder_attention_mask": (ids > 0).long()}
            batch["labels"][batch["decoder_attention_mask"].sum(dim=1) > 1, 0] = -100
    both = {}
    for rows in ("all", "targets"):
        both[rows] = run_fast(suite, decoder_rows=rows).model
        assert_same(both[rows], run_slow(suite, decoder_rows=rows).model, ROUNDING)
    assert distance(both["all"], both["targets"]) > 1e-3


@pytest.mark.parametrize("untied", [True, False])
def test_embeddings_head_norms_and_position_biases_stay(untied: bool):
    suite = t5_suite(seed=10, untied=untied)
    result = run_fast(suite)
    merged = dict(suite.merged.named_parameters(remove_duplicate=False))
    changed = set()
    for name, value in result.model.named_parameters(remove_duplicate=False):
        if not torch.equal(value, merged[name]):
            changed.add(name.split(".")[-2])
    assert changed == {"q", "k", "v", "o", "wi_0", "wi_1", "wo"}
    found: Any = result.model
    tied = found.lm_head.weight.data_ptr() == found.shared.weight.data_ptr()
    assert tied is not untied
    assert found.encoder.embed_tokens.weight is found.shared.weight
    left = [r["left"] for r in result.log.records if r["kind"] == "block"]
    assert {name.split(".")[-1] for name in left[0]} == {"relative_attention_bias", "layer_norm"}


def filed(suite: Suite, folder: Path) -> Suite:
    """Experts in files, which hold tied tensors once."""
    experts: dict[str, Any] = {}
    for task, expert in suite.experts.items():
        save_model(expert, str(folder / f"{task}.safetensors"))
        experts[task] = SafetensorsExpert(folder / f"{task}.safetensors")
    return replace(suite, experts=experts)


def test_tied_experts_read_from_a_file_give_the_same(tmp_path: Path):
    suite = t5_suite(seed=11)
    wanted = run_fast(suite).model
    assert_same(run_fast(filed(suite, tmp_path)).model, wanted, 0)


def test_first_inputs_of_a_stage_need_no_block_and_no_head(tmp_path: Path):
    suite = t5_suite(seed=15, untied=True, tasks=1)
    reads = run_fast(filed(suite, tmp_path)).reads
    sizes = {name: 8 * value.numel() for name, value in suite.merged.named_parameters()}
    rest = (
        sum(size for name, size in sizes.items() if ".block." not in name) - sizes["lm_head.weight"]
    )
    assert reads["experts"]["task_0"]["outside the blocks"] == rest


def test_loaded_tied_tensors_are_let_go():
    model = t5_suite(seed=12).merged
    expert = ExpertModel("task", InMemoryExpert(model), model)
    with expert.loaded(list(model.state_dict())) as loaded:
        assert not any(p.is_meta for p in loaded.parameters())
    assert all(p.is_meta for p in expert.module.parameters())
