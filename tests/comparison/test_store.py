"""What is kept on disk comes back as it was, and what is damaged does not come back."""

from pathlib import Path

import pytest
import torch
from comparison_parts import linear
from torch import nn

from fusion_bench_featcal.compare import ReportError
from fusion_bench_featcal.comparison.store import CellResult, ResultStore
from fusion_bench_featcal.settings import CalibrationError


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results")


def test_result_comes_back(store: ResultStore) -> None:
    result = CellResult(
        accuracy={"left": 0.5},
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


def test_other_fingerprint_is_another_result(store: ResultStore) -> None:
    store.keep_result("cell", "abc", CellResult(accuracy={"left": 0.5}))
    assert store.result("cell", "abd") is None


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        '{"accuracy": {}, "has_items": false, "more": 1}',
        '{"accuracy": {}, "has_items": false, "curves": {"left": [1]}}',
    ],
)
def test_damaged_result_is_made_again(store: ResultStore, damage: str) -> None:
    store.keep_result("cell", "abc", CellResult(accuracy={"left": 0.5}))
    (file,) = store.folder.rglob("result.json")
    file.write_text(damage)
    assert store.result("cell", "abc") is None


def test_result_without_its_items_is_made_again(store: ResultStore) -> None:
    flags = {"left": torch.tensor([True])}
    store.keep_result("cell", "abc", CellResult(accuracy={"left": 1.0}, correct=flags))
    (file,) = store.folder.rglob("items.npz")
    file.unlink()
    assert store.result("cell", "abc") is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_comes_back_bit_by_bit(store: ResultStore, dtype: torch.dtype) -> None:
    merged = linear(5).to(dtype)
    assert not store.has_model("wudi", "abc")
    store.keep_model("wudi", "abc", merged, {"seconds": 2.0})
    assert store.has_model("wudi", "abc")
    model, cost = store.model("wudi", "abc", lambda: linear(6))
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
    model, _ = store.model("wudi", "abc", tied)
    assert torch.equal(model[0].weight, merged[0].weight)  # type: ignore[index]
    assert model[1].weight is model[0].weight  # type: ignore[index]


def test_model_of_another_shape_is_refused(store: ResultStore) -> None:
    store.keep_model("wudi", "abc", linear(5), {})
    with pytest.raises(CalibrationError, match="the model that wudi made"):
        store.model("wudi", "abc", lambda: nn.Linear(2, 2))


def test_file_in_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(ReportError, match=r"taken is a file.*method\.results_dir"):
        ResultStore(tmp_path / "taken")
