"""Features that wait elsewhere come back as they were, and leave nothing behind."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, run_fast
from tiny_models import clip_suite, decoder_suite, normal, residual_suite, t5_suite
from torch import Tensor

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.engine import activations, places
from fusion_bench_featcal.engine.activations import (
    UNLIMITED,
    Activations,
    Store,
    WaitingBatch,
    open_activations,
)
from fusion_bench_featcal.engine.places import DiskPlace, HostPlace
from fusion_bench_featcal.modules.models import Problem
from fusion_bench_featcal.engine.rows import CountedRows
from fusion_bench_featcal.engine.samples import Batch
from fusion_bench_featcal.engine.transfers import PlainTransfers
from fusion_bench_featcal.families.base import BlockCall

CPU = torch.device("cpu")
SUITES: dict[str, Callable[[], Any]] = {
    "clip": clip_suite,
    "t5": lambda: t5_suite(depths=(1, 1)),
    "llama": decoder_suite,
    "replay": residual_suite,
}


class LateTransfers:
    """Copies that are made only when somebody waits for them, as on a stream of its own."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.done = 0
        self.started_before_needed = 0

    def to_host(self, source: Tensor, buffer: Tensor) -> None:
        buffer.fill_(0)
        self.queue.append((source.clone(), buffer))

    def to_device(self, buffer: Tensor, device: torch.device) -> tuple[Tensor, int]:
        tensor = torch.zeros_like(buffer)
        self.queue.append((buffer, tensor))
        return tensor, len(self.queue)

    def wait(self, copied: int, tensor: Tensor) -> None:
        self.started_before_needed += copied < len(self.queue)
        for source, target in self.queue[self.done : copied]:
            target.copy_(source)
        self.done = max(self.done, copied)


@pytest.fixture(params=["disk", "host"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    chosen = (
        DiskPlace(str(tmp_path)) if request.param == "disk" else HostPlace(CPU, LateTransfers())
    )
    opened = Store(chosen)
    yield opened
    opened.close()


def run(name: str, **more: Any) -> Any:
    return run_fast(SUITES[name]().to(torch.float32), **more).model


@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, {}) for name in SUITES]
    + [pytest.param(n, PLUS, marks=pytest.mark.slow if n != "t5" else ()) for n in SUITES],
)
def test_the_place_has_no_part_in_the_result(
    name: str, rule: dict[str, Any], tmp_path: Path, monkeypatch: Any
):
    wanted = run(name, activations="device", **rule)
    assert_identical(run(name, activations="disk", activations_dir=tmp_path, **rule), wanted)
    assert list(tmp_path.iterdir()) == []
    transfers = LateTransfers()
    host = Activations((Store(HostPlace(CPU, transfers)), UNLIMITED))
    monkeypatch.setattr("fusion_bench_featcal.calibration.open_activations", lambda *_, **__: host)
    assert_identical(run(name, **rule), wanted)
    assert transfers.started_before_needed


def test_auto_takes_the_first_place_with_room(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(activations, "free_bytes", lambda _: 1500)
    settings = FeatCalSettings(activations_dir=str(tmp_path))
    with open_activations(settings, CPU, lambda: 500) as opened:
        first, second = (opened.batch(None, 1, i, normal(i, 100), None) for i in range(2))
        assert not isinstance(first, WaitingBatch)
        assert isinstance(second, WaitingBatch)
        assert torch.equal(first.cal, normal(0, 100))
        assert torch.equal(second.cal, normal(1, 100))
        opened.release(first)
        assert not isinstance(opened.batch(None, 1, 2, normal(2, 100), None), WaitingBatch)
    assert list(tmp_path.iterdir()) == []


def test_a_batch_that_outgrows_its_room_waits_elsewhere(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(activations, "free_bytes", lambda _: 1000)
    settings = FeatCalSettings(activations_dir=str(tmp_path))
    with open_activations(settings, CPU) as opened:
        batch = opened.batch(None, 1, 0, normal(0, 100), None)
        assert opened.settled(batch) is batch
        batch.cal, rows = normal(1, 200), CountedRows.of_mask(torch.ones(1, 2))
        batch.valid = rows
        moved = opened.settled(batch)
        assert isinstance(moved, WaitingBatch)
        assert torch.equal(moved.cal, normal(1, 200))
        assert moved.valid is rows
        again = opened.batch(None, 1, 1, normal(2, 100), None)
        assert not isinstance(again, WaitingBatch)  # the room was given back


@pytest.mark.parametrize("room", [0.4, 0.7, 1.2])
def test_little_room_has_no_part_in_the_result(room: float, monkeypatch: Any):
    sizes: list[int] = []
    original = activations.tensor_bytes

    def size(value: Any) -> int:
        sizes.append(original(value))
        return sizes[-1]

    monkeypatch.setattr(activations, "tensor_bytes", size)
    wanted = run("t5")
    monkeypatch.setattr(activations, "free_bytes", lambda _: 4 * room * max(sizes))
    monkeypatch.setattr(Problem, "room_of_a_visit", lambda _: 0)
    assert_identical(run("t5"), wanted)


@pytest.mark.parametrize(
    "tensor",
    [
        normal(0, 3, 4, 5),
        normal(1, 3, 4, 5).transpose(0, 2),
        normal(2, 6, 8)[::2, 1:5],
        normal(3, 2, 1, 4).expand(2, 3, 4),
        normal(4, 1).reshape(()),
        normal(5, 7).to(torch.bfloat16),
        normal(6, 3, 3) > 0,
        torch.arange(5),
    ],
    ids=lambda tensor: f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()}",
)
def test_tensor_comes_back_in_its_layout(store: Store, tensor: Tensor):
    found = store.fetch(store.put(tensor))
    assert found is not tensor
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
    assert found.clone().stride() == tensor.clone().stride()


def test_nested_calls_keep_their_structure(store: Store):
    mask = torch.ones(2, 3)
    call = BlockCall(normal(0, 2, 3), (None, (mask, "text")), {"mask": mask, "more": [mask, 4]})
    found = store.fetch(store.put(call))
    assert torch.equal(found.hidden, call.hidden)
    assert found.args[0] is None
    assert found.args[1][1] == "text"
    assert found.kwargs["more"][1] == 4
    assert torch.equal(found.kwargs["mask"], mask)


def test_equal_objects_are_stored_once(store: Store):
    mask = torch.ones(100)
    first = store.put({"a": mask, "b": [mask]})
    assert first["a"] is first["b"][0]
    again = store.put(store.fetch(first))  # as a block hands its mask on
    assert again["a"] is first["a"]
    changed = store.fetch(again)["a"]
    changed.add_(1)
    assert torch.equal(store.fetch(store.put(changed)), mask + 1)
    assert torch.equal(store.fetch(first)["a"], mask)


def test_files_go_with_what_they_hold(tmp_path: Path):
    opened = Store(DiskPlace(str(tmp_path)))
    kept = [opened.put(normal(i, 10)) for i in range(3)]
    (folder,) = tmp_path.iterdir()
    assert len(list(folder.iterdir())) == 3
    del kept[0]
    assert len(list(folder.iterdir())) == 2
    opened.close()
    assert list(tmp_path.iterdir()) == []


def test_what_was_just_put_away_is_still_at_hand():
    opened = Activations((Store(HostPlace(CPU, LateTransfers())), UNLIMITED))
    batch = opened.batch(None, 1, 0, normal(0, 5), None)
    value = normal(0, 5)
    batch.exp_hidden = value
    assert batch.exp_hidden is value
    batch.exp_hidden = None
    assert batch.exp_hidden is None


def test_files_go_after_an_error_too(tmp_path: Path):
    suite = residual_suite()
    suite.inputs["task_1"][0][0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="NaN"):
        run_fast(suite, activations="disk", activations_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_names_the_settings(tmp_path: Path, monkeypatch: Any):
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(places, "_write", full)
    with pytest.raises(
        CalibrationError,
        match=r"No space left.*method\.activations_dir.*method\.samples_per_task",
    ):
        run("clip", activations="disk", activations_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match=r"no folder.*method\.activations_dir"):
        run("clip", activations="disk", activations_dir=tmp_path / "file")


def test_host_and_device_are_one_on_a_cpu():
    for choice in ("device", "host"):
        opened = open_activations(FeatCalSettings(activations=choice), CPU)
        assert type(opened.batch(None, 1, 0, normal(0, 3), None)) is Batch
    on_cpu = HostPlace(torch.device("meta"), PlainTransfers()).keep(normal(0, 3))
    assert torch.equal(on_cpu.tensor(), normal(0, 3))
