"""Files of runs: what is written is read back the same; damage is refused by name."""

import copy
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reports import (
    COLUMNS,
    GOLDEN,
    LEVELS,
    content_of,
    error_of,
    featcal,
    leave_lines,
    leave_run,
    leave_seeds,
    leave_study,
    make_report,
    patch,
)

from fusion_bench_featcal import lab
from fusion_bench_featcal.results import (
    Report,
    ReportError,
    load_items,
    prepare_directory,
    save_items,
)
from fusion_bench_featcal.results.long_table import means

NAN, INF = float("nan"), float("inf")


def lines(folder: Path, **names: Any) -> list[dict[str, Any]]:
    """Lines of the long table with given values."""
    found = lab.load(folder)
    records = found if isinstance(found, list) else found.to_dict("records")
    return [line for line in records if all(line[name] == value for name, value in names.items())]


# ---- written and read


def test_a_written_report_loads_as_the_same_and_an_earlier_ones_items_are_gone(tmp_path: Path):
    @dataclass(frozen=True)
    class Settings:
        ridge_lambda: float
        modules: tuple[str, ...]
        folder: Path

    report = make_report(versions={"torch": "2"})
    settings = Settings(ridge_lambda=0.05, modules=("mlp", "norm"), folder=Path("data"))
    cost = {"seconds": np.float32(1.5), "bytes": torch.tensor(3)}
    half = {"cars": torch.tensor(0.5), "dtd": 0.25}
    report.add_row("new", half, settings=settings, cost=cost, loss={"cars": NAN, "dtd": 1.5})
    folder = report.write(tmp_path / "deep" / "run").parent
    loaded = Report.load(folder)
    assert loaded.to_dict() == report.to_dict()
    expected = {"ridge_lambda": 0.05, "modules": ["mlp", "norm"], "folder": "data"}
    assert (loaded.settings["new"], loaded.cost["new"]) == (expected, {"seconds": 1.5, "bytes": 3})
    assert loaded.loss == {"new": {"dtd": 1.5}}
    assert "the loss of cars is nan" in (folder / "report.md").read_text()
    for name, tasks in report.items.items():
        for task, flag in tasks.items():
            np.testing.assert_array_equal(loaded.items[name][task], flag)
    names = {"items.npz", "lines.csv", "report.json", "report.md"}
    assert {path.name for path in folder.iterdir()} == names
    make_report(items=False).write(folder)
    assert Report.load(folder).items == {}


def test_every_number_of_a_report_is_a_line(tmp_path: Path):
    report = make_report()
    report.add_row("new", {"cars": 0.123456, "dtd": 0.65432}, loss={"cars": 2.0}, cost={"x": "no"})
    report.labels = {"samples_per_task": 8}
    report.write(tmp_path)
    content, entries = content_of(tmp_path), {}
    for line in lines(tmp_path, samples_per_task=8, seed=42, merger="task_arithmetic"):
        entries[line["row"], line["metric"], line["task"]] = line["value"]
    for name, row in content["rows"].items():
        assert {task: entries[name, "accuracy", task] for task in row} == row
        shares = content["recovered_gap_per_task"][name]
        shares |= {"average": content["recovered_gap"][name]}
        assert {task: entries[name, "recovered_gap", task] for task in row} == shares
    assert entries["featcal", "cost.seconds", ""] == 10 and ("new", "cost.x", "") not in entries
    assert entries["new", "loss", "cars"] == 2.0 and ("new", "loss", "average") not in entries
    assert entries["featcal", "recovered_gap", "average"] == pytest.approx(0.5)


def test_items_survive_with_any_names(tmp_path: Path):
    generator = np.random.default_rng(0)
    rows = ["featcal:demo", "../up/down", "índice 索引", "index", "array_0", ""]
    items = {row: {task: generator.random(17) < 0.5 for task in ("a|b", "a/b")} for row in rows}
    save_items(tmp_path, items)
    loaded = load_items(tmp_path)
    assert loaded is not None and list(loaded) == rows
    for row, tasks in items.items():
        for task, flag in tasks.items():
            assert loaded[row][task].dtype == np.bool_
            np.testing.assert_array_equal(loaded[row][task], flag)


@pytest.mark.parametrize("pandas", [True, False])
def test_the_long_table_of_runs_comparisons_studies_and_diagnoses(
    pandas: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if pandas:
        pytest.importorskip("pandas")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
        monkeypatch.setattr("fusion_bench_featcal.lab.report.load.find_spec", lambda _: None)
    seeds = leave_seeds(tmp_path / "seeds")
    assert isinstance(lab.load(seeds[0]), list) != pandas
    whole = lines(seeds[0])
    (seeds[0] / "lines.csv").unlink()  # as an earlier version left it
    assert lines(seeds[0]) == whole and [*whole[0]] == [*COLUMNS]
    assert featcal("report", *seeds, "--out", tmp_path / "tables").code == 0
    chosen = {"row": "featcal", "metric": "accuracy", "task": "average"}
    found = lines(tmp_path / "tables", **chosen)
    assert [line["value"] for line in found] == pytest.approx([0.7, 0.75, 0.8])
    assert lines(tmp_path) == lines(tmp_path / "tables")  # each run counts once
    found = lines(leave_study(tmp_path / "study"), **chosen, samples_per_task=64)
    assert [line["value"] for line in found] == pytest.approx([0.675, 0.685])
    named = {"row": 'one, "two"\nthree', "block": "0", "class": "c", "metric": "drift"}
    diagnosed = leave_lines(leave_run(tmp_path / "d"), [named | {"value": 0.1 + 0.2}])
    (line,) = lines(diagnosed)
    assert line == dict.fromkeys(COLUMNS, "") | named | {"value": 0.1 + 0.2}
    assert len(lines(GOLDEN, row="surgery", merger="simple_average", **{"task": "average",
                     "metric": "accuracy"})) == 2  # fmt: skip


def test_notes_are_lines(tmp_path: Path):
    note = {"kind": "drift", "text": "dtd drifts", "row": "featcal", "task": "dtd"}
    for seed in (1, 2):
        leave_run(tmp_path / str(seed), seed=seed, notes=[note])
    (line,) = lab.load_notes(tmp_path)
    assert line == {"suite": "toy", "merger": "", **note}


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def disk_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = leave_run(tmp_path / "run")
    (tmp_path / "page.html").write_text("old")
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    monkeypatch.setattr(os, "replace", disk_full)
    with pytest.raises(ReportError, match="No space left"):
        make_report(items=False).write(run)
    told = error_of("report", run, "--html", tmp_path / "page.html")
    assert "No space left on device" in told and "--html" in told
    assert {path.name: path.read_bytes() for path in run.iterdir()} | before == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]
    assert (tmp_path / "page.html").read_text() == "old"


def test_results_are_as_readable_as_the_umask_says(tmp_path: Path):
    (tmp_path / "plain").write_text("x")
    run = leave_run(tmp_path / "run")
    assert (run / "report.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


# ---- refused by name

BAD_ROWS: list[tuple[dict[str, Any], str]] = [
    ({"accuracy": {"cars": 0.5}}, r"'new'.*missing \['dtd'\]"),
    ({"accuracy": {"cars": 0.5, "dtd": 0.5, "svhn": 0.5}}, r"'new'.*extra \['svhn'\]"),
    ({"accuracy": {"cars": 50.0, "dtd": 0.5}}, "'new', task 'cars': accuracy 50.0"),
    ({"accuracy": {"cars": NAN, "dtd": 0.5}}, "'new', task 'cars': accuracy nan"),
    ({"accuracy": {}}, "'new' has no task"),
    ({"name": "featcal"}, "'featcal' is already"),
    ({"settings": {"x": NAN}}, "new.x: nan cannot be written"),
    ({"settings": {"x": object()}}, "new.x: a object cannot"),
    ({"correct": {"cars": [True] * 2, "dtd": [True] * 2}}, r"2 of 2 test items are right.*0\.5"),
    ({"correct": {"cars": [True, False], "dtd": [True]}}, "2 test items, the test set has 200"),
    ({"correct": {"cars": np.arange(200) < 100}}, "task 'dtd': no flags"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_ROWS, ids=lambda value: str(value)[:40])
def test_bad_rows_are_refused(changes: dict[str, Any], message: str):
    row = {"name": "new", "accuracy": {"cars": 0.5, "dtd": 0.5}} | changes
    report = make_report()
    with pytest.raises(ReportError, match=message):
        report.add_row(row.pop("name"), row.pop("accuracy"), **row)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([[True]], r"row 'base', task 'a'.*shape \(1, 1\)"),
        ([], r"shape \(0,\)"),
        ([0.5, 1.0], "must be true or false"),
    ],
)
def test_bad_flags_are_refused(tmp_path: Path, flags: list[object], message: str):
    with pytest.raises(ReportError, match=message):
        save_items(tmp_path, {"base": {"a": flags}})
    assert list(tmp_path.iterdir()) == []


BAD_REPORTS: list[tuple[Any, str]] = [
    ({"schema": 99}, "has schema 99; this version .* reads schema 2"),
    ({"kind": "other"}, "is not the report of a run"),
    ({"surprise": 1}, r"unknown keys \['surprise'\]"),
    ({"loss": []}, "loss must be a mapping, got list"),
    ({"loss": {"other": {"cars": 1.0}}}, "the loss of 'other' must map the row's task names"),
    ({"loss": {"base": {"cars": "low"}}}, "loss: base: cars must be int or float"),
    ({"rows": []}, "rows must be a mapping, got list"),
    ({"rows": {"base": {"a": 0.5}}}, "row 'base' has no 'average'"),
    ({"rows": {"base": {"a": 0.5, "average": 0.6}}}, "'base': average 0.6 is not the mean"),
    ({"rows": {"base": {"a": 2, "average": 2}}}, "'base', task 'a': accuracy 2"),
    ({"rows": {"base": {"a": "high", "average": 1}}}, "a must be int or float, got str"),
    ({"samples": {"base": {"a": {"samples": 1}}}}, "samples: base: a: no split"),
    (None, r"cannot read .*report\.json"),
    ('{"kind": "run"', r"report\.json is not valid JSON"),
    ('{"kind": "run", "schema": 2}', r"missing keys \['cost', 'device'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_REPORTS, ids=lambda value: str(value)[:40])
def test_loading_names_what_is_wrong(tmp_path: Path, changes: Any, message: str):
    folder = leave_run(tmp_path, items=False)
    if changes is None:
        (folder / "report.json").unlink()
    elif isinstance(changes, str):
        (folder / "report.json").write_text(changes)
    else:
        patch(folder, **changes)
    with pytest.raises(ReportError, match=message) as caught:
        Report.load(folder)
    assert str(tmp_path) in str(caught.value)


def test_files_of_earlier_versions_stay_readable(tmp_path: Path):
    """Some had no losses, a digest in every file, and none in arrays."""
    folder = leave_run(tmp_path)
    whole = Report.load(folder).to_dict()
    content = content_of(folder)
    del content["loss"]
    (folder / "report.json").write_text(json.dumps({"digest": "0a"} | content))
    with np.load(folder / "items.npz") as archive:
        np.savez_compressed(folder / "items.npz", **dict(archive))
    assert Report.load(folder).to_dict() == whole


def test_items_of_another_run_are_refused(tmp_path: Path):
    one = leave_run(tmp_path / "one")
    two = leave_run(tmp_path / "two", LEVELS | {"featcal": 0.7})
    (two / "items.npz").replace(one / "items.npz")
    with pytest.raises(ReportError, match="row 'featcal', task 'cars': 140 of 200"):
        Report.load(one)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("suite,", "suit,", "its first line has no suite"),
        (",2\n", ",two\n", ", line 3: 'two' is no number"),
        (",2\n", ",nan\n", ", line 3: 'nan' is no number"),
        (",2\n", "\n", ", line 3: its columns are not those of the first line"),
        (",2\n", ",2,3\n", ", line 3: its columns are not those of the first line"),
    ],
)
def test_damaged_lines_are_refused(old: str, new: str, message: str, tmp_path: Path):
    rows = [{"row": "featcal", "metric": "drift", "value": value} for value in (1, 2)]
    file = leave_lines(leave_run(tmp_path), rows) / "lines.csv"
    text = file.read_text().replace("\r\n", "\n").replace(old, new, 1)
    file.write_text(text)
    with pytest.raises(ReportError, match=message) as caught:
        lab.load(tmp_path)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)
    if "first line has no" in message:
        assert message in error_of("report", tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"suite": "toys"}, "would mix the suites toy, toys"),
        ({"task": "average"}, "would mix a task with what it is part of"),
        ({"class": "c", "metric": "relative"}, "would mix a class with what it is part of"),
    ],
)
def test_numbers_of_a_diagnosis_that_must_not_be_averaged_are_refused(
    changes: dict[str, str], message: str, tmp_path: Path
):
    line = {"suite": "toy", "merger": "task_arithmetic", "row": "featcal", "task": "a",
            "block": "b", "metric": "relative", "value": 1.0}  # fmt: skip
    several = [line | {"row": row} for row in ("task_arithmetic", "featcal")]
    run = leave_lines(leave_run(tmp_path), [*several, several[1] | changes])
    assert message in error_of("report", run)


def test_different_metrics_are_not_averaged():
    line = {"suite": "toy", "row": "featcal", "task": "a", "metric": "drift", "value": 1.0}
    assert means([line, line | {"task": "b", "value": 2.0}], "row") == {("featcal",): 1.5}
    with pytest.raises(ReportError, match="would mix the metrics drift, items"):
        means([line, line | {"metric": "items"}], "row")


@pytest.mark.parametrize("below", ["", "run/version_0"])
def test_a_file_in_the_place_of_a_folder_is_named_with_the_setting(tmp_path: Path, below: str):
    place = tmp_path / "logs"
    place.write_text("in the way")
    with pytest.raises(ReportError, match=r"logs.*: (File exists|Not a dir).*path\.log_dir"):
        make_report().write(place / below)
    with pytest.raises(ReportError, match="Change --out"):
        prepare_directory(place, "--out")
    run = leave_run(tmp_path / "run")
    for option in ("--out", "--html", "--figures"):
        told = error_of("report", run, option, place / below / ("a.html" * (option == "--html")))
        assert f"Change {option} to a writable directory." in told


# ---- damaged and hostile files

CURVE = {"name": "surgery", "task": "cars", "losses": [[0, 1.5], [20, 0.25]]}
LOG = {"kind": "task", "task": "cars", "block": "layers.0", "drift_before": 2.0, "drift_after": 1.0}
HOSTILE: list[Any] = [
    None, True, -1, 0.5, 2**60, "x", "", [], {}, [[]], [1, "a"], {"a": {"b": []}}, 1e308, -1e308,
]  # fmt: skip
RAW = ["1e999", "-1e999", "NaN", "Infinity", "9" * 5000, "[" * 100_000, '"\\ud800"', "\u0000"]
BAD_CURVES = [[[1, 2, 3]], [[20, 1.0], [0, 2.0]], [[0, NAN]], []]
BAD_DRIFT: list[dict[str, Any]] = [{"task": 3}, {"drift_after": "x"}, {"block": None},
                                   {"relative_drift_before": []}]  # fmt: skip


@pytest.fixture(scope="module")
def undamaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison of two runs with everything that is read back."""
    folder = tmp_path_factory.mktemp("undamaged")
    for merger in ("average", "wudi"):
        levels = {"base": 0.3, "experts": 0.9, merger: 0.5, "featcal": 0.7}
        run = leave_run(folder / merger, levels, upstream=merger, notes=[{"text": "a note"}])
        (run / "training_curves.jsonl").write_text(json.dumps(CURVE) + "\n")
        (run / "calibration_log.jsonl").write_text(json.dumps(LOG) + "\n")
    assert featcal("report", folder, "--out", folder).code == 0
    return folder


@pytest.fixture
def folder(undamaged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(undamaged, tmp_path / "results")


def damages(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Flipped bits, other bytes, gaps, doubled parts, cut ends and overwritten parts."""
    generator = random.Random(seed)
    for number in range(count):
        start = generator.randrange(len(content))
        end = min(len(content), start + generator.choice([1, 1, 4, 64, 400]))
        flipped = bytes([content[start] ^ (1 << generator.randrange(8))])
        before, after = content[:start], content[end:]
        yield [
            before + flipped + content[start + 1 :],
            before + generator.randbytes(1) + content[start + 1 :],
            before + after,
            content[:end] + content[start:],
            before,
            before + generator.randbytes(end - start) + after,
        ][number % 6]


def test_damaged_items_are_refused_or_change_nothing(folder: Path):
    run, refused = folder / "average", 0
    file, whole = run / "items.npz", {t: f.tolist() for t, f in load_items(run)["featcal"].items()}  # type: ignore[index]
    content = file.read_bytes()
    single_bits = (
        content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :]
        for at in range(0, len(content) - 66, 7)  # the seal is at the end
    )
    for number, damaged in enumerate([*damages(content, 250, seed=9), *single_bits]):
        file.write_bytes(damaged)
        try:
            loaded = load_items(run)
            assert loaded is not None
            assert {t: f.tolist() for t, f in loaded["featcal"].items()} == whole
            assert number < 250 or damaged == content, "a flipped bit was not noticed"
        except ReportError as error:
            refused += 1
            assert "items.npz is damaged" in str(error)
    assert refused > 125
    index = np.array([["base", "a"]], dtype=object)
    np.savez(file, index=index, allow_pickle=True)
    with pytest.raises(ReportError, match=r"items\.npz is damaged.*allow_pickle"):
        load_items(run)


def test_items_that_would_fill_the_memory_are_refused(tmp_path: Path):
    file = tmp_path / "items.npz"
    np.savez_compressed(file, index=np.zeros(9, bool))
    content = bytearray(file.read_bytes())
    size = content.index(b"PK\1\2") + 24  # in the archive's directory
    content[size : size + 4] = (2**32 - 2).to_bytes(4, "little")
    file.write_bytes(content)
    with pytest.raises(ReportError, match=r"items\.npz is damaged.*unpacks to 4294967294 bytes"):
        load_items(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values in nested lists and mappings."""
    yield path
    listed = enumerate(value) if isinstance(value, list) else ()
    for key, entry in value.items() if isinstance(value, dict) else listed:
        yield from places(entry, (*path, key))


def changed(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path."""
    whole = [copy.deepcopy(content)]
    inside: Any = whole
    for key in (0, *path)[:-1]:
        inside = inside[key]
    inside[(0, *path)[-1]] = value
    return whole[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["report.json", "average/report.json"])
def test_hostile_reports_are_read_or_refused(name: str, folder: Path):
    """Every value of any type, everywhere."""
    file = folder / name
    for flags in folder.rglob("items.npz"):
        flags.unlink()  # intervals from them take time
    content = json.loads(file.read_text())
    every = [(path, value) for path in places(content) for value in HOSTILE]
    codes = set()
    for path, value in random.Random(5).sample(every, 80):
        file.write_text(json.dumps(changed(content, path, value)))
        done = featcal("report", folder)
        codes.add(done.code)
        assert done.code == 0 or done.err.startswith("featcal: error: "), (path, value)
    assert codes == {0, 2}


def damaged_files() -> Iterator[tuple[str, str, bytes]]:
    """A file of the comparison, what its refusal names, and its damaged content."""
    for name in ("report.json", "average/report.json"):
        for raw in RAW:
            text = '{"kind": "run", "schema": 2, "rows": ' + raw + "}\n"
            yield name, "report.json", text.encode()
        for raw in (b"\xff\xfe", b"\x00" * 9, b""):
            yield name, "report.json", raw
    curves, log = "average/training_curves.jsonl", "average/calibration_log.jsonl"
    texts = [json.dumps(CURVE | {"losses": losses}) for losses in BAD_CURVES]
    for text in ["{", "[]", '{"name": "surgery"}', *texts]:
        yield curves, "training_curves.jsonl", text.encode()
    records = [json.dumps(LOG | change) for change in BAD_DRIFT]
    for text in ["{", "[1]", *(f"{json.dumps(LOG)}\n{record}\n" for record in records)]:
        yield log, "calibration_log.jsonl", text.encode()


@pytest.mark.parametrize(
    ("name", "named", "content"), [*damaged_files()], ids=lambda v: str(v)[:30]
)
def test_damaged_files_are_refused_by_name(
    name: str, named: str, content: bytes, folder: Path, tmp_path: Path
):
    (folder / name).write_bytes(content)
    assert named in error_of("report", folder, "--figures", tmp_path / "figures")
