"""Samples that are held out to choose ridges."""

from typing import Any

import pytest
import torch
from tiny_texts import llama_model
from torch import Tensor, nn

from fusion_bench_featcal.modules.models import in_float32
from fusion_bench_featcal.settings import Options
from fusion_bench_featcal.streams.batch import Batch, Positions
from fusion_bench_featcal.streams.samples import take


def held_out(task: str = "a", size: int = 16, **options: Any) -> list[Tensor]:
    """The held-out samples among 43 images, and among each copy of these."""
    batches = list(torch.rand(43, 3, 4, 4).split(size))
    taken = take(task, batches, Options(**options), nn.Identity(), holds_out=True)
    copies = sorted({batch.copy for batch in taken})
    masks = [
        [b.held_out for b in taken if b.copy == copy and b.held_out is not None] for copy in copies
    ]
    return [torch.cat(mask) for mask in masks]


def test_a_quarter_is_drawn_by_seed_and_task_for_any_batches():
    (drawn,) = held_out()
    assert drawn.sum() == 10 and torch.equal(drawn, held_out(size=5)[0])
    for other in (held_out(seed=1), held_out("b")):
        assert other[0].sum() == 10 and not torch.equal(other[0], drawn)
    assert drawn.nonzero().flatten().diff().unique().numel() > 2  # no fixed pattern


def test_copies_are_held_out_with_their_sample():
    first, *copies = held_out(augment="jitter")
    assert len(copies) == 5 and all(torch.equal(copy, first) for copy in copies)


def test_held_out_rows_are_those_of_the_positions_at_hand():
    """New positions may have the address of freed ones, and as many rows."""
    batch = Batch(None, 2, held_out=torch.tensor([True, False]))
    features, rows = torch.zeros(2, 4, 3), torch.zeros(5, 3)
    for _ in range(100):
        for counts in ((4, 1), (1, 4), (3, 2)):
            mask = torch.stack([torch.arange(4) < count for count in counts])
            positions = Positions.from_mask(mask)
            assert len(positions.of(features)) == len(rows)
            _, held_out = batch.fitted_and_held_out(range(2), positions, rows)
            assert held_out.tolist() == [*range(counts[0])]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("flash_attention_2", torch.bfloat16), ("sdpa", torch.float32)]
)
def test_only_a_model_with_flash_attention_keeps_16_bits(kind: str, dtype: torch.dtype):
    model: Any = llama_model().bfloat16()
    model.config._attn_implementation = kind
    block = model.model.layers[0]
    with in_float32(block) as widened:
        assert {p.dtype for p in block.parameters()} == {dtype}
        assert widened(torch.zeros(2, dtype=torch.bfloat16)).dtype == dtype
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
