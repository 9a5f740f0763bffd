"""Damaged and hostile files that reports are read back from: refused by name, never different."""

import copy
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusion_bench_featcal import json_files
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.lab.report.find import find
from fusion_bench_featcal.lab.report.views import write
from fusion_bench_featcal.results import Report, ReportError, items, load_items, save_items
from fusion_bench_featcal.results.curves import drift_records, load_curves, write_curves
from fusion_bench_featcal.results.notes import NOTE, Note
from fusion_bench_featcal.results.report import summarise

CURVES = {"surgery": {"cars": [(0, 1.5), (20, 0.25)], "dtd": [(0, 2.0), (20, 1.0)]}}
LOG = {"task": "cars", "block": "layers.0", "drift_before": 2.0, "drift_after": 1.0}
HOSTILE: list[Any] = [
    None, True, -1, 0.5, 2**60, "x", "", [], {}, [[]], [1, "a"], {"a": {"b": []}}, 1e308, -1e308,
]  # fmt: skip
RAW = ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "[" * 100_000, '"\\ud800"', "\u0000"]


def leave(folder: Path) -> Path:
    """A comparison of two runs with everything that is read back."""
    generator = np.random.default_rng(0)
    for merger in ("average", "wudi"):
        report = Report(suite="toy", upstream=merger, seeds={"comparison": 3})
        for name in ("base", "experts", merger, "surgery"):
            correct = {task: generator.random(40) < 0.6 for task in ("cars", "dtd")}
            report.add_row(
                name,
                {task: flags.mean() for task, flags in correct.items()},
                settings={"rank": 16, "nested": {"seed": 1}},
                cost={"seconds": 1.5, "peak_rss_bytes": 2**20, "gpu": "unavailable"},
                samples={"cars": {"samples": 8, "split": "train"}},
                correct=correct,
            )
        report.versions["torch"] = "2.0"
        report.device["cpu"] = "some"
        report.note(Note(NOTE, "a note"))
        report.write(folder / merger)
        write_curves(folder / merger, CURVES)
        (folder / merger / "calibration_log.jsonl").write_text(json.dumps(LOG) + "\n")
    write(summarise([folder / "average", folder / "wudi"]), folder)
    return folder


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return leave(tmp_path_factory.mktemp("undamaged"))


@pytest.fixture
def folder(undamaged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(undamaged, tmp_path / "results")


def everything(folder: Path) -> Any:
    """All that is read back, in a form that can be compared."""
    found = find([folder])
    reports = [Report.load(run) for run in found.runs]
    flags = [
        (row, task, values.tolist())
        for report in reports
        for row, tasks in report.items.items()
        for task, values in tasks.items()
    ]
    comparison = json_files.read_json(folder / "report.json")
    curves = [load_curves(run) for run in found.runs]
    return [found.failed, [report.to_dict() for report in reports], flags, comparison, curves]


def damages(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Flipped bits, other bytes, gaps, doubled parts, cut ends and overwritten parts."""
    generator = random.Random(seed)
    for number in range(count):
        start = generator.randrange(len(content))
        end = min(len(content), start + generator.choice([1, 1, 4, 64, 400]))
        kind = number % 6
        flipped = content[start] ^ (1 << generator.randrange(8))
        yield {
            0: content[:start] + bytes([flipped]) + content[start + 1 :],
            1: content[:start] + generator.randbytes(1) + content[start + 1 :],
            2: content[:start] + content[end:],
            3: content[:end] + content[start:],
            4: content[:start],
            5: content[:start] + generator.randbytes(end - start) + content[end:],
        }[kind]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("average/items.npz", 250),
    ],
)
def test_damage_is_refused_by_name_or_changes_nothing(name: str, count: int, folder: Path) -> None:
    whole, file = everything(folder), folder / name
    content, refused = file.read_bytes(), 0
    for damaged in damages(content, count, seed=len(name)):
        file.write_bytes(damaged)
        try:
            # Without its report a folder is no run: what is left is another, whole result.
            assert everything(folder) == whole
        except ReportError as error:
            refused += 1
            assert file.parent.name in str(error)
    assert refused > count / 2


def test_every_single_bit_of_the_items_counts(folder: Path) -> None:
    folder = folder / "average"
    content = (folder / "items.npz").read_bytes()
    known = load_items(folder)
    assert known is not None
    for place in range(0, len(content) - 66, 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        (folder / "items.npz").write_bytes(damaged)
        with pytest.raises(ReportError, match=r"items\.npz is damaged"):
            load_items(folder)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, entry in value.items() if isinstance(value, dict) else listed:
        yield from places(entry, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    content = copy.deepcopy(content)
    inside = content
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    return content


@pytest.mark.slow
@pytest.mark.parametrize("name", ["report.json", "average/report.json"])
def test_hostile_reports_are_read_or_refused(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every value of any type, everywhere."""
    file = folder / name
    for flags in folder.rglob("items.npz"):
        flags.unlink()  # intervals from them take time
    content = json.loads(file.read_text())
    every = [(path, value) for path in places(content) for value in HOSTILE]
    codes = set()
    for path, value in random.Random(5).sample(every, 80):
        file.write_text(json.dumps(changed(content, path, value)))
        code = main(["report", str(folder)])
        assert code in (0, 2), (path, value)
        codes.add(code)
        printed = capsys.readouterr().err
        assert code == 0 or printed.startswith("featcal: error: "), (path, value)
    assert codes == {0, 2}


@pytest.mark.parametrize("raw", RAW)
@pytest.mark.parametrize(
    "name", ["report.json", "average/report.json", "average/training_curves.jsonl"]
)
def test_impossible_json_is_refused_by_name(name: str, raw: str, folder: Path) -> None:
    (folder / name).write_text('{"kind": "run", "schema": 2, "rows": ' + raw + "}\n")
    with pytest.raises(ReportError, match=name.replace(".", r"\.")):
        everything(folder)


@pytest.mark.parametrize("raw", [b"\xff\xfe", b"\x00" * 9, b""])
@pytest.mark.parametrize("name", ["report.json", "average/training_curves.jsonl"])
def test_bytes_that_are_no_text_are_refused_by_name(raw: bytes, name: str, folder: Path) -> None:
    (folder / name).write_bytes(raw)
    with pytest.raises(ReportError, match=name.replace(".", r"\.")):
        everything(folder)


@pytest.mark.parametrize(
    "record",
    [{**LOG, "task": 3}, {**LOG, "drift_after": "x"}, {**LOG, "block": None}, {"drift_before": 1,
     "drift_after": 2}, {**LOG, "relative_drift_before": []}],
)  # fmt: skip
def test_hostile_drift_is_refused_by_name(record: Any, tmp_path: Path) -> None:
    file = tmp_path / "calibration_log.jsonl"
    file.write_text(json.dumps(LOG) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ReportError, match=r"calibration_log\.jsonl, line 2"):
        drift_records(file)


def test_items_that_unpack_to_a_mountain_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "_MOST_BYTES", 1000)
    save_items(tmp_path, {"row": {"task": [True] * 2000}})
    with pytest.raises(ReportError, match="it unpacks to"):
        load_items(tmp_path)


def test_files_with_a_digest_stay_readable(folder: Path) -> None:
    """Earlier versions wrote a digest into every file, and none into arrays."""
    whole = everything(folder)
    for file in [*folder.rglob("report.json"), *folder.rglob("training_curves.jsonl")]:
        count = 1 if file.suffix == ".json" else -1  # in each line
        file.write_text(file.read_text().replace("{", '{"digest": "0a",', count))
    with np.load(folder / "average" / "items.npz") as archive:
        np.savez_compressed(folder / "average" / "items.npz", **dict(archive))
    assert everything(folder) == whole
