"""Memory of one task's matrices serves the next one's, and holds nothing of it."""

import torch

from fusion_bench_featcal.engine.spares import Spares

LIKE = torch.zeros((), dtype=torch.float64)


def test_memory_is_used_again_and_empty():
    spares = Spares()
    first = spares.zeros(LIKE, 3, 4).fill_(7)
    spares.give([first])
    again = spares.zeros(LIKE, 3, 4)
    assert again.data_ptr() == first.data_ptr()
    assert not again.any()
    assert spares.zeros(LIKE, 3, 4).data_ptr() != again.data_ptr()  # nobody else gets it


def test_other_shapes_and_dtypes_get_their_own():
    spares = Spares()
    given = spares.zeros(LIKE, 3, 4)
    spares.give([given])
    for found in (spares.zeros(LIKE, 4, 3), spares.zeros(LIKE.float(), 3, 4)):
        assert found.data_ptr() != given.data_ptr()
    assert spares.zeros(LIKE, 4, 3).shape == (4, 3)


def test_nothing_is_kept_in_the_end():
    spares = Spares()
    given = spares.zeros(LIKE, 3, 4)
    spares.give([given])
    spares.clear()
    assert spares.zeros(LIKE, 3, 4).data_ptr() != given.data_ptr()
