"""Features that wait elsewhere come back as they were, and leave nothing behind."""

import errno
import weakref
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import normal
from torch import Tensor

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.streams.batch import Batch
from fusion_bench_featcal.streams.storage import (
    DeviceStorage,
    DiskStorage,
    HostStorage,
    StoredTensor,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    hidden: Tensor
    rest: tuple[Any, ...]


def batch_of(*tensors: Any) -> Batch:
    call = Call(tensors[0], tensors[1:])
    return Batch(None, 1, cal=call, exp={"all": [call.hidden]}, noted={"fc1": [*tensors[:1]]})


def there_and_back(storage: DeviceStorage, *tensors: Any) -> tuple[Any, ...]:
    batch = batch_of(*tensors)
    for _ in storage.visits([batch]):
        pass
    assert isinstance(batch.cal.hidden, StoredTensor)
    with storage.loaded(batch):
        assert batch.exp["all"][0] is batch.cal.hidden is batch.noted["fc1"][0]
        return batch.cal.hidden, *batch.cal.rest


TENSORS = {
    "plain": normal(0, 3, 4),
    "float32": normal(0, 3, 4).float(),
    "bfloat16": normal(0, 3, 4).bfloat16(),
    "mask": normal(0, 3, 4) > 0,
    "tokens": torch.arange(6).view(2, 3),
    "scalar": torch.tensor(2.5),
    "transposed": normal(0, 3, 4).T,
    "channels last": normal(0, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": normal(0, 1, 4).expand(3, 4),
    "part": normal(0, 6, 8)[1:4, ::2],
    "infinite": torch.tensor([float("nan"), float("inf")]),
}


@pytest.mark.parametrize("value", TENSORS.values(), ids=list(TENSORS))
@pytest.mark.parametrize("kind", [HostStorage, DiskStorage])
def test_tensors_come_back_as_they_were(kind: Any, value: Tensor, tmp_path: Path):
    storage = kind(CPU, *([str(tmp_path)] if kind is DiskStorage else []))
    hidden, empty, text = there_and_back(storage, value, torch.empty(0), "text")
    torch.testing.assert_close(hidden, value, rtol=0, atol=0, equal_nan=True)
    assert [s == 0 for s in hidden.stride()] == [s == 0 for s in value.stride()]
    order = [sorted(range(t.ndim), key=lambda d, t=t: -t.stride(d)) for t in (hidden, value)]
    assert order[0] == order[1] and empty.numel() == 0 and text == "text"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [HostStorage, DiskStorage])
def test_what_has_not_changed_is_not_stored_again(kind: Any, tmp_path: Path):
    storage = kind(CPU, *([str(tmp_path)] if kind is DiskStorage else []))
    batch = batch_of(normal(0, 3), normal(1, 3), normal(2, 3))
    with storage.loaded(batch):
        pass
    before = batch.cal
    with storage.loaded(batch):
        batch.cal.rest[0].add_(1)
        batch.cal = Call(normal(3, 3), batch.cal.rest)
    assert batch.cal.rest[1] is before.rest[1]
    assert batch.cal.rest[0] is not before.rest[0] and batch.cal.hidden is not before.hidden
    torch.testing.assert_close(before.rest[0].data, normal(1, 3))  # what waits is not written to
    with storage.loaded(batch):
        torch.testing.assert_close(batch.cal.rest[0], normal(1, 3) + 1)


def test_one_batch_and_the_next_are_on_the_device():
    storage, batches = HostStorage(CPU), [batch_of(normal(n, 3)) for n in range(4)]
    for _ in range(2):
        for number, batch in enumerate(storage.visits(batches)):
            assert batch is batches[number] and isinstance(batch.cal.hidden, Tensor)
            if number:
                assert isinstance(batches[number - 1].cal.hidden, StoredTensor)
    assert list(storage.visits([])) == []


class SlowStream:
    """A stream whose copies are done when somebody waits for it. Before that they are NaN."""

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def copied(self, tensor: Tensor) -> Tensor:
        self.copies.append((torch.full_like(tensor, torch.nan), tensor))
        return self.copies[-1][0]

    def wait_stream(self, other: "SlowStream") -> None:
        while other.copies:
            target, source = other.copies.pop(0)
            target.copy_(source)


def test_features_arrive_before_they_are_read(monkeypatch: pytest.MonkeyPatch):
    device, copying, current = [], SlowStream(), SlowStream()

    def arriving(data: Tensor, *_: Any, **__: Any) -> Tensor:
        device.append(weakref.ref(copy := copying.copied(data)))
        return copy

    storage, batches = HostStorage(CPU), [batch_of(torch.full((3, 4), 1.0 * n)) for n in range(4)]
    monkeypatch.setattr(storage, "_stream", copying)
    monkeypatch.setattr(storage, "put", current.copied)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(Tensor, "to", arriving)
    for visit in range(3):
        for number, batch in enumerate(storage.visits(batches)):
            assert torch.equal(batch.cal.hidden, torch.full((3, 4), 1.0 * number + visit))
            batch.cal = replace(batch.cal, hidden=batch.cal.hidden + 1)
            here = sum(copy() is not None for copy in device)  # later two of each batch
            assert here <= (4 if visit else 2)


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").touch()
    with pytest.raises(CalibrationError, match=r"no folder for activations.*activations_dir"):
        DiskStorage(CPU, str(tmp_path / "file"))
    storage = DiskStorage(CPU, str(tmp_path))

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    with pytest.raises(CalibrationError, match=r"No space left.*lower method\.samples_per_task"):
        there_and_back(storage, normal(0, 3))
