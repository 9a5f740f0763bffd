"""Samples that are held out to choose ridges."""

from typing import Any

import torch
from torch import Tensor, nn

from fusion_bench_featcal.settings import Options
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
