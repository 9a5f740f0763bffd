"""Tables of texts: values stay as they are written, and wrong lines are named by their number."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.data.tables import load_texts, read_table
from fusion_bench_featcal.data.text_rows import TextRows

ROWS = [
    {"prompt": "a, b", "target": "00042"},
    {"prompt": 'two\nlines "quoted"', "target": "2024-01-31"},
    {"prompt": "x", "target": "1e3"},
    {"prompt": "y", "target": "NA"},
]
CSV = 'prompt,target\n"a, b",00042\n"two\nlines ""quoted""",2024-01-31\n\nx,1e3\ny,NA\n'
FILES = {
    "a.csv": "\ufeff" + CSV,
    "b.csv": CSV.replace("\n\n", "\r\n\r\n"),
    "a.jsonl": "\n".join(json.dumps(row) for row in ROWS),
    "b.jsonl": "\ufeff" + "".join(json.dumps(row) + "\r\n\r\n" for row in ROWS),
    "a.json": json.dumps(ROWS, indent=1),
}


def rows_of(path: Path, **options: Any) -> TextRows:
    return TextRows(load_texts(str(path)), "data", **options)


@pytest.mark.parametrize("name", [*FILES, "a.parquet"])
def test_values_are_the_texts_that_were_written(name: str, tmp_path: Path):
    path = tmp_path / name
    if name in FILES:
        path.write_bytes(FILES[name].encode())
    else:
        datasets.Dataset.from_list(ROWS).to_parquet(path)
    rows = rows_of(path)
    assert [rows[n] for n in range(len(rows))] == ROWS
    assert [rows.read(n).target for n in range(4)] == [row["target"] for row in ROWS]
    assert read_table(path, None)["target"][0] == "00042"


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("a.csv", ["line 2", "line 3", "line 6", "line 7"]),
        ("a.jsonl", ["line 1", "line 2", "line 3", "line 4"]),
        ("b.jsonl", ["line 1", "line 3", "line 5", "line 7"]),
        ("a.json", ["item 0", "item 1", "item 2", "item 3"]),
    ],
)
def test_rows_are_named_by_their_line(name: str, places: list[str], tmp_path: Path):
    (tmp_path / name).write_bytes(FILES[name].encode())
    rows = rows_of(tmp_path / name)
    assert [rows.at(n) for n in range(len(rows))] == [f"data, {place}" for place in places]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "a"}\n\n{"prompt" "b"}', "jsonl: line 3: Expecting ':'"),
        ("a.jsonl", f'{{"prompt": "a"}}\n{"[" * 9000}', "jsonl: line 2: "),
        ("a.jsonl", '{"prompt": "a"}\n3', "jsonl: line 2 is no object, but int"),
        ("a.json", "[3]", "json: item 0 is no object, but int"),
        ("a.csv", 'a,b\n"x\ny",1\nx\n', "csv: line 4: 1 values for 2 columns"),
        ("a.csv", 'a,b\nx,1\n"y,2\n', "csv: line 3: unexpected end of data"),
        ("a.csv", "a,a\nx,1\n", "csv: line 1 names a column twice"),
        ("a.csv", b"a,b\n\xff,1\n", "csv: 'utf-8' codec can't decode"),
        ("a.parquet", "a", "parquet: "),
    ],
)
def test_wrong_lines_are_named(name: str, content: Any, message: str, tmp_path: Path):
    data = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(data)
    with pytest.raises(CalibrationError, match=f"{name}' is not readable as {message}"):
        load_texts(str(tmp_path / name))


def test_the_names_of_classes_are_read(tmp_path: Path):
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "a"])}
    )
    table = datasets.Dataset.from_dict({"prompt": ["x"] * 3, "label": [0, 1, -1]}, features)
    table.to_parquet(tmp_path / "a.parquet")
    rows = rows_of(tmp_path / "a.parquet", columns={"prompt": "prompt", "target": "label"})
    assert [rows.read(n).target for n in range(3)] == ["b", "a", None]
    assert rows.classes("target") == ["b", "a"] and rows.classes("prompt") is None


def test_a_row_that_is_no_mapping_is_refused():
    with pytest.raises(CalibrationError, match="data, item 1: a text is a mapping, got str"):
        TextRows([{"text": "a"}, "b"], "data").read(1)


KTO = [{"prompt": "q", "completion": "a", "label": n % 3 > 0} for n in range(6)]
WEIGHED = [{"messages": [], "weight": n % 3} for n in range(6)]


@pytest.mark.parametrize(("values", "left"), [(KTO, [1, 2, 4, 5]), (WEIGHED, [1, 2, 4, 5])])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_bad_answers_and_rows_without_weight_are_left_out(
    values: list[dict[str, Any]], left: list[int], name: str, tmp_path: Path
):
    table = datasets.Dataset.from_list(values)
    (table.to_json if name == "a.jsonl" else table.to_parquet)(tmp_path / name)
    rows = rows_of(tmp_path / name)
    assert (len(rows), rows.left_out) == (4, 2)
    line = 1 if name == "a.jsonl" else 0
    assert [int(rows.at(n).split()[-1]) - line for n in range(4)] == left
