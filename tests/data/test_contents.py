"""Digests of data: they change with the content of every file that is read, and with no other."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import datasets
import pytest

from fusion_bench_featcal.data import contents
from fusion_bench_featcal.data.contents import digest_data

MEDIA = {"a.png": b"first picture", "deep/b.wav": b"a sound", "c": b"another picture"}
ROWS = [
    {"prompt": "what", "image": "a.png"},
    {"prompt": "~none /: \0", "messages": [{"content": [{"image": {"path": "deep/b.wav"}}]}]},
    {"prompt": "x" * 5000, "images": ["c"], "n": 1},
]


def write_media(folder: Path) -> None:
    for name, content in MEDIA.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def jsonl(folder: Path) -> Path:
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return folder / "data.jsonl"


def csv(folder: Path) -> Path:
    (folder / "data.csv").write_text("image,label\n" + "".join(f"{name},1\n" for name in MEDIA))
    return folder / "data.csv"


def parquet(folder: Path) -> Path:
    table = datasets.Dataset.from_dict({"audio": [str(folder / name) for name in MEDIA]})
    table.cast_column("audio", datasets.Audio()).to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def embedded(folder: Path) -> Path:
    files = [{"bytes": content, "path": name} for name, content in MEDIA.items()]
    datasets.Dataset.from_dict({"image": files}).to_parquet(folder / "data.parquet")
    return folder / "data.parquet"


def saved(folder: Path) -> Path:
    datasets.Dataset.from_dict({"image": [*MEDIA], "n": [1, 2, 3]}).save_to_disk(folder / "saved")
    return folder / "saved"


@pytest.mark.parametrize("write", [jsonl, csv, parquet, embedded, saved])
def test_files_that_a_table_names_count_by_content(write: Callable[[Path], Path], tmp_path: Path):
    write_media(tmp_path)
    (tmp_path / "beside.txt").write_text("in no row")
    location = str(write(tmp_path))
    before = digest_data(location)
    (tmp_path / "beside.txt").write_text("changed")
    assert digest_data(location) == before
    for name, content in MEDIA.items():
        (tmp_path / name).write_bytes(content[::-1])
        assert (digest_data(location) == before) == (write is embedded), name
        (tmp_path / name).write_bytes(content)
    assert digest_data(location) == before


def test_copies_of_data_have_one_digest(tmp_path: Path):
    for name in ("one", "two"):
        write_media(tmp_path / name)
    one, two = (digest_data(str(jsonl(tmp_path / name))) for name in ("one", "two"))
    assert one == two


def test_linked_class_folders_count_and_hidden_files_do_not(tmp_path: Path):
    write_media(tmp_path / "elsewhere")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "class").symlink_to(tmp_path / "elsewhere")
    before = digest_data(str(tmp_path / "images"))
    (tmp_path / "images" / ".hidden").write_text("")
    (tmp_path / "images" / "cache-12.arrow").write_text("")
    assert digest_data(str(tmp_path / "images")) == before
    (tmp_path / "elsewhere" / "deep" / "b.wav").write_bytes(b"A sound")
    assert digest_data(str(tmp_path / "images")) != before


def test_every_byte_of_a_file_counts(tmp_path: Path):
    write_media(tmp_path)
    before = digest_data(str(tmp_path))
    for place in range(len(MEDIA["c"])):
        content = bytearray(MEDIA["c"])
        content[place] += 1
        (tmp_path / "c").write_bytes(content)
        assert digest_data(str(tmp_path)) != before, place
    (tmp_path / "c").write_bytes(MEDIA["c"] + b"e")
    assert digest_data(str(tmp_path)) != before


def test_places_and_splits(tmp_path: Path):
    write_media(tmp_path / "data" / "train")
    shutil.copytree(tmp_path / "data" / "train", tmp_path / "data" / "test")
    train, test = (digest_data(f"{tmp_path}/data:{split}") for split in ("train", "test"))
    assert train == test == digest_data(f"{tmp_path}/data/train")
    first, second = (digest_data(f"{tmp_path}/data:{split}") for split in ("fit", "more"))
    assert len({first, second, train}) == 3 and None not in (first, second)
    for absent in ("org/data", f"{tmp_path}/absent", "", "x" * 5000, "~none", "a:b", "\0"):
        assert digest_data(absent) is None


@pytest.mark.skipif(not os.path.exists("/proc/uptime"), reason="no such file")
def test_texts_that_are_names_of_the_systems_files_are_texts(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "since?", "target": "/proc/uptime"}))
    assert digest_data(f"{tmp_path}/data.jsonl") == digest_data(f"{tmp_path}/data.jsonl")
    assert not contents._named_files(f"{tmp_path}/data.jsonl", tmp_path)
