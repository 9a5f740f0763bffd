"""What is kept on disk comes back as it was, and what is damaged does not come back."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_parts import linear
from torch import nn

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.files import owner_mark, remove
from fusion_bench_featcal.lab.compare.store import CellResult, ResultStore
from fusion_bench_featcal.results import ReportError


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results")


def test_result_comes_back(store: ResultStore) -> None:
    result = CellResult(
        accuracy={"left": 0.5},
        loss={"left": 0.75},
        settings={"factor": 2},
        cost={"seconds": 1.5, "peak_accelerator_bytes": "unavailable"},
        samples={"left": {"samples": 8, "split": "train"}},
        seed=3,
        notes=["a note"],
        curves={"left": [(0, 1.5), (20, 0.25)]},
        correct={"left": torch.tensor([True, False])},
    )
    store.keep_result("wudi--featcal:mini", "abc", result)
    known = store.result("wudi--featcal:mini", "abc")
    assert known is not None and known.correct is not None
    assert known.correct["left"].tolist() == [True, False]
    known.correct = result.correct
    assert known == result
    assert store.result("wudi--featcal:mini", "abd") is None


@pytest.mark.parametrize("damage", ["[]", "[" * 99999])
def test_damaged_result_is_made_again(
    store: ResultStore, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.keep_result("cell", "abc", CellResult(accuracy={"left": 0.5}))
    (file,) = store.folder.rglob("result.json")
    file.write_text(damage)
    assert store.result("cell", "abc") is None
    assert f"the result in {file.parent} is damaged and made again" in caplog.text


def whole_entries(store: ResultStore) -> CellResult:
    result = CellResult(
        accuracy={"left": 0.5},
        loss={"left": 1.25},
        cost={"seconds": 1.5},
        curves={"left": [(0, 1.5), (20, 0.25)]},
        correct={"left": torch.tensor([True, False] * 20)},
    )
    store.keep_result("cell", "abc", result)
    store.keep_model("wudi", "abc", linear(5), {"seconds": 2.0})
    return result


@pytest.mark.parametrize("name", ["result.json", "items.npz", "model.safetensors", "cost.json"])
def test_no_flipped_bit_goes_unnoticed(store: ResultStore, name: str) -> None:
    whole_entries(store)
    merged = linear(5).state_dict()
    (file,) = store.folder.rglob(name)
    content = file.read_bytes()
    known, noticed = store.result("cell", "abc"), 0
    assert known is not None
    for place in range(0, len(content), max(1, len(content) // 150)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(damaged)
        kept = store.model("wudi", "abc", lambda: linear(6))
        result = store.result("cell", "abc")
        noticed += kept is None or result is None
        if kept is not None:  # white space
            assert kept[1] == {"seconds": 2.0}
            assert all(torch.equal(merged[n], t) for n, t in kept[0].state_dict().items())
        if result is not None:
            assert (result.accuracy, result.cost) == (known.accuracy, known.cost)
            assert result.correct is not None and known.correct is not None
            assert (result.correct["left"] == known.correct["left"]).all()
    assert noticed > 100


@pytest.mark.parametrize("name", ["result.json", "items.npz", "model.safetensors", "cost.json"])
@pytest.mark.parametrize("shape", ["folder", "file for its folder", "file for all", "absent"])
def test_nothing_in_the_way_stays_there(store: ResultStore, name: str, shape: str) -> None:
    whole_entries(store)
    (file,) = store.folder.rglob(name)
    place = {"file for its folder": file.parent, "file for all": file.parent.parent}.get(
        shape, file
    )
    remove(place)
    if shape == "folder":
        (file / "inside").mkdir(parents=True)
    elif shape != "absent":
        place.touch()
    cell = name in ("result.json", "items.npz")
    if cell:
        assert store.result("cell", "abc") is None
    else:
        assert store.model("wudi", "abc", lambda: linear(6)) is None
    whole_entries(store)
    assert store.result("cell", "abc") is not None
    assert store.model("wudi", "abc", lambda: linear(6)) is not None


def test_what_cannot_be_kept_ends_nothing(
    store: ResultStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    whole_entries(store)
    assert "the result of cell is not kept" in caplog.text
    assert "the model that wudi made is not kept" in caplog.text
    assert "No space left on device" in caplog.text
    assert not list(store.folder.rglob("*.part"))


def test_leftovers_are_swept_but_not_those_of_a_living_process(store: ResultStore) -> None:
    folder = store.folder / "cells" / "cell-abc"
    folder.mkdir(parents=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    host = owner_mark().removesuffix(f"-{os.getpid()}")
    for place in (folder, store.folder):
        (place / f".result.json.{host}-{dead.pid}-0.part").touch()
    living = folder / f".result.json.{host}-{os.getppid()}-0.part"
    living.touch()
    others = store.folder / ".download.part"
    others.touch()
    # A save that ended between its two renames: the only copy of the old model.
    old = f".merged.{host}-{dead.pid}-0.old"
    (store.folder / old).mkdir()
    ResultStore(store.folder)
    assert list(folder.iterdir()) == [living]
    left = sorted(path.name for path in store.folder.iterdir())
    assert left == [".download.part", old, "cells"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_comes_back_bit_by_bit(store: ResultStore, dtype: torch.dtype) -> None:
    merged = linear(5).to(dtype)
    assert store.model("wudi", "abc", lambda: linear(6)) is None
    assert store.keep_model("wudi", "abc", merged, {"seconds": 2.0})
    kept = store.model("wudi", "abc", lambda: linear(6))
    assert kept is not None
    model, cost = kept
    assert cost == {"seconds": 2.0}
    assert all(torch.equal(merged.state_dict()[n], t) for n, t in model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not list(store.folder.rglob("*.part"))


def test_tied_weights_are_kept(store: ResultStore) -> None:
    def tied() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    merged = tied()
    store.keep_model("wudi", "abc", merged, {})
    kept = store.model("wudi", "abc", tied)
    assert kept is not None
    model = kept[0]
    assert torch.equal(model[0].weight, merged[0].weight)  # type: ignore[index]
    assert model[1].weight is model[0].weight  # type: ignore[index]


def test_model_of_another_shape_is_refused(store: ResultStore) -> None:
    store.keep_model("wudi", "abc", linear(5), {})
    with pytest.raises(CalibrationError, match="the model that wudi made"):
        store.model("wudi", "abc", lambda: nn.Linear(2, 2))


def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ReportError, match=r"taken.*: (File exists|Not a dir).*method\.results_dir"):
        ResultStore(tmp_path / "taken")
