"""Images processed in threads: the same batches in the same order, and no thread that stays."""

import os
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessor

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.calibration_images import TaskBatches, decode_workers
from fusion_bench_featcal.data.images import ImageItems


class Rows:
    """Arrays with their number in every pixel; notes reads and the threads that read."""

    def __init__(self, number: int = 50, broken: int | None = None) -> None:
        self.number, self.broken = number, broken
        self.read, self.threads = 0, set()

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        if index == self.broken:
            raise KeyboardInterrupt
        self.read += 1
        self.threads.add(threading.get_ident())
        return np.full((1, 1, 3), index, np.uint8)


def batches(rows: Any, process: Any, workers: int, batch_size: int = 4) -> TaskBatches:
    items = ImageItems(rows, name="rows")
    return TaskBatches("task", items, list(range(len(rows))), batch_size, process, workers=workers)


def pixels(array: np.ndarray) -> torch.Tensor:
    time.sleep(int(array[0, 0, 0]) % 3 / 500)  # later items are often ready first
    return torch.from_numpy(array).permute(2, 0, 1).float()


def helpers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("featcal-images")]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_images_come_in_order_and_are_read_in_the_callers_thread(workers):
    rows = Rows()
    given = [batch["pixel_values"][:, 0, 0, 0] for batch in batches(rows, pixels, workers)]
    assert torch.cat(given).tolist() == list(range(50))
    assert rows.threads == {threading.get_ident()}
    assert not helpers()


def test_at_most_one_batch_is_read_ahead():
    rows = Rows()
    for taken, _ in enumerate(batches(rows, pixels, 2), start=1):
        assert rows.read <= 4 * taken + 4 + 1


@pytest.mark.parametrize("workers", [0, 2])
def test_error_comes_when_its_image_is_due(workers):
    def fails(array: np.ndarray) -> torch.Tensor:
        if array[0, 0, 0] in (9, 11):
            raise OSError(f"number {array[0, 0, 0]}")
        return pixels(array)

    given = iter(batches(Rows(), fails, workers))
    assert len([next(given), next(given)]) == 2
    with pytest.raises(RuntimeError, match=r"item 9: .*number 9"):
        next(given)
    assert not helpers()


def test_closing_and_failing_reads_leave_no_thread():
    given = iter(batches(Rows(), pixels, 2))
    next(given)
    given.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not helpers()
    with pytest.raises(KeyboardInterrupt):
        list(batches(Rows(broken=10), pixels, 2))
    assert not helpers()


@pytest.mark.parametrize(("cores", "workers"), [(1, 0), (2, 2), (64, 8)])
@pytest.mark.parametrize("has_affinity", [True, False])
def test_automatic_number_is_one_per_core_up_to_eight(monkeypatch, cores, workers, has_affinity):
    if has_affinity:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    else:
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert decode_workers(FeatCalSettings(), CLIPImageProcessor()) == workers
    assert decode_workers(FeatCalSettings(), pixels) == 0  # it may not be safe in threads
    assert decode_workers(FeatCalSettings(decode_workers=3), pixels) == 3
