"""Tables of texts: values stay as they are written, and wrong lines are named by their number."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data import tables
from fusion_bench_featcal.data.text_rows import TextRows

ROWS = [
    {"prompt": "a, b", "target": "00042"},
    {"prompt": 'two\nlines "quoted"', "target": "2024-01-31"},
    {"prompt": "x", "target": "1e3"},
    {"prompt": "y", "target": "NA"},
]
CSV = 'prompt,target\n"a, b",00042\n"two\nlines ""quoted""",2024-01-31\n\nx,1e3\ny,NA\n'
# Content of a file, and the places of its rows.
FILES: dict[str, tuple[str, str, list[int]]] = {
    "a.csv": ("\ufeff" + CSV.replace("\n\n", "\r\n\r\n"), "line", [2, 3, 6, 7]),
    "a.jsonl": ("\n".join(map(json.dumps, ROWS)), "line", [1, 2, 3, 4]),
    "a.json": (json.dumps(ROWS, indent=1), "example", [0, 1, 2, 3]),
    "a.parquet": ("", "example", [0, 1, 2, 3]),
}


def rows_of(path: Path, **options: Any) -> TextRows:
    return TextRows(tables.load_texts(str(path)), "data", **options)


@pytest.mark.parametrize("name", FILES)
def test_values_are_the_texts_that_were_written_with_their_places(name: str, tmp_path: Path):
    (content, place, numbers), path = FILES[name], tmp_path / name
    if content:
        path.write_bytes(content.encode())
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    rows = rows_of(path)
    assert [rows[n] for n in range(len(rows))] == ROWS
    assert [rows.read(n).target for n in range(4)] == [row["target"] for row in ROWS]
    assert [rows.row_name(n) for n in range(4)] == [f"data, {place} {n}" for n in numbers]


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.jsonl", '{"prompt": "a"}\n\n{"prompt" "b"}', "jsonl: line 3: Expecting ':'"),
    ("a.json", "[3]", "json: example 0 is of type int, not an object"),
    ("a.csv", 'a,b\n"x\ny",1\nx\n', "csv: line 4: 1 values for 2 columns"),
    ("a.csv", "text;label\nx;1\n", "csv: line 1 separates columns with ';', CSV needs commas"),
    ("a.csv", "text\tlabel\nx\t1\n", r"csv: line 1 separates columns with '\\t', CSV"),
    ("a.csv", b"a,b\n1,2\ncaf\xe9,3\n", "csv: line 3 is not UTF-8: save the file in this enco"),
    ("a.parquet", "a", "parquet: "),
])  # fmt: skip
def test_wrong_lines_are_named(name: str, content: str | bytes, message: str, tmp_path: Path):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CalibrationError, match=f"{name}' is not readable as {message}"):
        tables.load_texts(str(tmp_path / name))


def test_names_of_classes_are_targets(tmp_path: Path):
    label = datasets.ClassLabel(names=["b", "a"])
    features = datasets.Features({"prompt": datasets.Value("string"), "label": label})
    table = datasets.Dataset.from_dict({"prompt": ["x"] * 3, "label": [0, 1, -1]}, features)
    table.to_parquet(tmp_path / "a.parquet")
    rows = rows_of(tmp_path / "a.parquet", columns={"prompt": "prompt", "target": "label"})
    assert [rows.read(n).target for n in range(3)] == ["b", "a", None]
    assert rows.classes("target") == ["b", "a"] and rows.classes("prompt") is None


@pytest.mark.parametrize(("split", "right"), [("train", ["train"]), (None, [])])
def test_of_a_saved_dataset_without_splits_no_other_is_read(split, right, tmp_path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS, split=split).save_to_disk(folder)
    for name in (str(folder), *(f"{folder}:{name}" for name in right)):
        assert list(tables.load_texts(name, "test")) == ROWS
    for name in {"train", "test", "None"} - {*right}:
        with pytest.raises(ValueError, match=rf"saved' is .*: remove split \('{name}'\)"):
            tables.load_texts(f"{folder}:{name}", "test")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_bad_answers_are_left_out(name: str, tmp_path: Path):
    values = [{"prompt": "q", "completion": "a", "label": n % 3 > 0} for n in range(6)]  # KTO
    table = datasets.Dataset.from_list(values)
    (table.to_json if name == "a.jsonl" else table.to_parquet)(tmp_path / name)
    rows, first = rows_of(tmp_path / name), int(name == "a.jsonl")
    assert (len(rows), rows.left_out) == (4, 2)
    assert [int(rows.row_name(n).split()[-1]) - first for n in range(4)] == [1, 2, 4, 5]
