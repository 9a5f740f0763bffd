from pathlib import Path

import numpy as np
import pytest

from fusion_bench_featcal.results import ReportError, load_items, save_items


def test_items_survive_with_any_names(tmp_path: Path):
    generator = np.random.default_rng(0)
    rows = ["featcal:demo", "../up/down", "índice 索引", "index", "array_0", ""]
    items = {row: {task: generator.random(17) < 0.5 for task in ("a|b", "a/b")} for row in rows}
    save_items(tmp_path, items)
    loaded = load_items(tmp_path)
    assert loaded is not None
    assert list(loaded) == rows
    for row, tasks in items.items():
        for task, flags in tasks.items():
            assert loaded[row][task].dtype == np.bool_
            np.testing.assert_array_equal(loaded[row][task], flags)


def test_no_items_is_none(tmp_path: Path):
    assert load_items(tmp_path) is None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([[True]], r"row 'base', task 'a'.*shape \(1, 1\)"),
        ([], r"shape \(0,\)"),
        ([0.5, 1.0], "must be true or false"),
    ],
)
def test_malformed_flags_are_named(tmp_path: Path, flags: list[object], message: str):
    with pytest.raises(ReportError, match=message):
        save_items(tmp_path, {"base": {"a": flags}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"no archive at all"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "items.npz").write_bytes(content)
    with pytest.raises(ReportError, match=r"items\.npz is damaged"):
        load_items(tmp_path)


def test_pickled_items_are_refused(tmp_path: Path):
    index = np.array([["base", "a"]], dtype=object)
    np.savez(tmp_path / "items.npz", index=index, allow_pickle=True)
    with pytest.raises(ReportError, match=r"items\.npz is damaged.*allow_pickle"):
        load_items(tmp_path)
