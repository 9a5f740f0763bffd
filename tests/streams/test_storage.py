"""Features that wait elsewhere come back as they were."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import normal
from torch import Tensor

from fusion_bench_featcal.streams import Batch
from fusion_bench_featcal.streams.storage import DeviceStorage, HostStorage, StoredTensor

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Call:
    """Arguments of a block."""

    hidden: Tensor
    rest: tuple[Any, ...]


def batch_of(*tensors: Any) -> Batch:
    call = Call(tensors[0], tensors[1:])
    return Batch(None, 1, cal=call, exp={"all": [call.hidden]}, noted={"fc1": tensors[0]})


def there_and_back(storage: DeviceStorage, *tensors: Any) -> tuple[Any, ...]:
    batch = batch_of(*tensors)
    assert [*storage.visits([batch])] == [batch] and isinstance(batch.cal.hidden, StoredTensor)
    with storage.loaded(batch):
        assert batch.exp["all"][0] is batch.cal.hidden is batch.noted["fc1"]
        return batch.cal.hidden, *batch.cal.rest


TENSORS = (
    normal(0, 3, 4).bfloat16(),
    normal(0, 3, 4) > 0,
    torch.arange(6).view(2, 3),
    torch.tensor(2.5),
    normal(0, 3, 4).T,
    normal(0, 2, 3, 4, 5).to(memory_format=torch.channels_last),
    normal(0, 1, 4).expand(3, 4),
    normal(0, 6, 8)[1:4, ::2],
    torch.tensor([float("nan"), float("inf")]),
)


@pytest.fixture
def storage() -> Any:
    return HostStorage(CPU)


def test_tensors_come_back_as_they_were(storage: Any):
    for value in TENSORS:
        hidden, empty, text = there_and_back(storage, value, torch.empty(0), "text")
        torch.testing.assert_close(hidden, value, rtol=0, atol=0, equal_nan=True)
        assert [s == 0 for s in hidden.stride()] == [s == 0 for s in value.stride()]
        order = [sorted(range(t.ndim), key=lambda d, t=t: -t.stride(d)) for t in (hidden, value)]
        assert order[0] == order[1] and empty.numel() == 0 and text == "text"


def test_unchanged_tensors_are_not_stored_again(storage: Any):
    batch = batch_of(normal(0, 3), normal(1, 3), normal(2, 3))
    with storage.loaded(batch):
        pass
    before = batch.cal
    with storage.loaded(batch):
        batch.cal.rest[0].add_(1)
        batch.cal = Call(normal(3, 3), batch.cal.rest)
    assert batch.cal.rest[1] is before.rest[1] and batch.cal.rest[0] is not before.rest[0]
    torch.testing.assert_close(before.rest[0].data, normal(1, 3))  # stored data are not written to
    with storage.loaded(batch):
        torch.testing.assert_close(batch.cal.hidden, normal(3, 3))
        torch.testing.assert_close(batch.cal.rest[0], normal(1, 3) + 1)


def test_one_batch_and_the_next_are_on_the_device():
    storage, batches = HostStorage(CPU), [batch_of(normal(n, 3)) for n in range(4)]
    for _ in range(2):
        for number, batch in enumerate(storage.visits(batches)):
            assert batch is batches[number] and isinstance(batch.cal.hidden, Tensor)
            if number:
                assert isinstance(batches[number - 1].cal.hidden, StoredTensor)
    assert list(storage.visits([])) == []
