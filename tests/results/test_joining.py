"""Joined runs: what is averaged and compared, for all pairs of the reports that there are."""

import csv
import json
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
from reports import leave_cells, leave_rows, leave_run, leave_seeds

from fusion_bench_featcal.results import ReportError, frame_of, join, join_folders, read_run

SAVED = Path(__file__).parents[2] / "docs" / "results"
STORAGE = {"activations", "checkpoint_dir", "resume"}


class Raw(NamedTuple):
    """A model in a file, read without the package: the values that distinguish it, and scores."""

    name: tuple[str, str, str]
    made_of: str
    seed: Any
    values: dict[str, float]


@cache
def raw_rows(folder: Path) -> list[Raw]:
    """The evaluated rows of a run's files."""
    with (folder / "lines.csv").open(newline="") as file:
        lines = [line for line in csv.DictReader(file)
                 if line["metric"] == "accuracy" and line["task"] != "average"]  # fmt: skip
    rows = []
    for row in json.loads((folder / "run.json").read_text())["rows"]:
        name = (row["suite"], row["merger"], row["name"])
        values = {line["task"]: float(line["value"]) for line in lines
                  if (line["suite"], line["merger"], line["row"]) == name}  # fmt: skip
        parts: list[Any] = []
        for part in ("settings", "conditions", "samples"):
            kept = {k: v for k, v in row[part].items() if k not in STORAGE}
            seeds = [k for k in kept if k.split(".")[-1] == "seed" and kept[k] == row["seed"]]
            parts.append({k: v for k, v in kept.items() if k not in seeds})
        if values:
            rows.append(Raw(name, json.dumps(parts, sort_keys=True), row["seed"], values))
    return rows


def expected(folders: list[Path]) -> list[tuple[Any, ...]]:
    """Suite, merger, name, number of seeds and average: the newest of each seed, alike in all."""
    alike: dict[tuple[Any, ...], dict[Any, dict[str, float]]] = {}
    for row in (row for folder in folders for row in raw_rows(folder)):
        alike.setdefault((row.name, row.made_of), {})[row.seed] = row.values
    result = []
    for (name, _), by_seed in alike.items():
        groups = [by_seed]
        if None in by_seed and len(by_seed) > 1:  # a model without randomness
            seedless = {None: by_seed[None]}
            drawn = {seed: values for seed, values in by_seed.items() if seed is not None}
            is_copy = all(values == by_seed[None] for values in drawn.values())
            groups = [seedless] if is_copy else [seedless, drawn]
        for of in groups:
            averages = [fmean(values.values()) for values in of.values()]
            result.append((*name, len(of), round(fmean(averages), 9)))
    return sorted(result)


def reports(folder: Path) -> Iterator[Path]:
    """Reports that differ in one thing each, and those of docs/results."""
    yield leave_run(folder / "run")
    yield leave_seeds(folder / "seeds")
    yield leave_cells(folder / "cells")
    levels: dict[str, Any] = {"experts": 0.9, "ties": 0.5, "featcal": 0.7}
    changes: list[Mapping[str, Any]] = [
        {"settings": {"ridge_lambda": 1.0}}, {"settings": {"ridge_lambda": 1}, "seed": 2},
        {"settings": {"flag": True}}, {"settings": {"flag": "true"}, "seed": 3},
        {"settings": {"task_weights": {"cars": 1, "dtd": 2}}},
        {"settings": {"task_weights": {"dtd": 1, "cars": 2}}, "seed": 4},
        {"settings": {"task_weights": {"a": 1, "b": 2}}, "seed": 5},
        {"settings": {"mode": None}}, {"settings": {"mode": "null"}, "seed": 6},
        {"settings": {"mode": "unset"}, "seed": 7}, {"seed": 8}, {"seed": None},
        {"settings": {"precision": 16}, "conditions": {"precision": "32-true"}},
        {"settings": {"precision": 16}, "conditions": {"precision": "bf16-true"}, "seed": 9},
        {"conditions": {"inputs": "a"}}, {"conditions": {"inputs": "b"}, "seed": 10},
        {"samples": {"cars": {"samples": 8, "split": "train"}}},
        {"samples": {"cars": {"samples": 8, "split": "test"}}, "seed": 11},
        {"samples": {"cars": {"samples": 9, "split": "train"}}, "seed": 12},
    ]  # fmt: skip
    for number, change in enumerate(changes):
        row = {name: level + number / 1000 for name, level in levels.items()}
        yield leave_rows(folder / f"change{number}", row, **change)
    yield from sorted(path for path in SAVED.iterdir() if path.is_dir())


@pytest.mark.slow
@pytest.mark.ci
def test_no_two_reports_are_joined_to_a_wrong_average(tmp_path: Path) -> None:
    all_of = {
        folder: sorted(file.parent for file in folder.rglob("run.json"))
        for folder in reports(tmp_path)
    }
    runs = {folder: read_run(folder) for of in all_of.values() for folder in of}
    joined = refused = 0
    for one, two in combinations(all_of, 2):
        if {runs[f].suite for f in all_of[one]}.isdisjoint(runs[f].suite for f in all_of[two]):
            continue  # nothing in common
        folders = [*all_of[one], *all_of[two]]
        tasks = {(row.name[0], tuple(sorted(row.values))) for f in folders for row in raw_rows(f)}
        try:
            frame = frame_of(join({folder: runs[folder] for folder in folders}))
        except ReportError:
            refused += 1
            assert len(tasks) > len({suite for suite, _ in tasks})
            continue
        joined += 1
        found = sorted(
            (line.first.suite, line.first.merger, line.first.name, len(line.rows),
             round(line.values["average"], 9))
            for line in frame.lines if line.values
        )  # fmt: skip
        assert found == expected(folders), (one, two)
        heads = [(*line.record().values(),)[:3] for line in frame.lines]
        labels = [tuple(line.first.labels.items()) for line in frame.lines]
        assert len({*zip(heads, labels, strict=True)}) == len(frame.lines), (one, two)
    assert joined > 200, (joined, refused)


def merged_and_repaired(folder: Path, levels: tuple[float, float], **facts: Any) -> None:
    """Write a run of a merger with its own number of samples, and a method on it with 8."""
    merger_settings = facts.pop("merger_settings", {})
    leave_rows(folder / "m", {"ties": levels[0]}, settings=merger_settings, conditions=facts)
    merger_conditions = {f"ties.{key}": value for key, value in merger_settings.items()}
    leave_rows(folder / "r", {"featcal": levels[1]}, settings={"samples_per_task": 8},
               conditions=facts | merger_conditions)  # fmt: skip


def test_a_rows_merger_has_its_settings_under_the_mergers_name(tmp_path: Path) -> None:
    for samples, levels in {8: (0.3, 0.5), 64: (0.4, 0.8)}.items():
        merger_settings = {"samples_per_task": samples}
        merged_and_repaired(tmp_path / str(samples), levels, merger_settings=merger_settings)
    lines = [line for line in frame_of(join_folders([tmp_path])).lines if line.gain]
    key = "ties.samples_per_task"
    gains = {line.first.labels[key]: line.gain.value for line in lines if line.gain}
    assert gains == pytest.approx({8: 0.2, 64: 0.4})


@pytest.mark.parametrize("key", ["precision", "inputs", "tasks"])
def test_rows_of_other_tests_are_no_partners(key: str, tmp_path: Path) -> None:
    """Not even if only one model has the name, so that the condition is no label."""
    leave_rows(tmp_path / "e", {"experts": 0.9}, conditions={key: "a"})
    merged_and_repaired(tmp_path / "b", (0.4, 0.8), **{key: "b"})
    (line,) = (line for line in frame_of(join_folders([tmp_path])).lines if line.first.is_repair)
    assert line.gain and line.gain.value == pytest.approx(0.4) and line.share is None
    leave_rows(tmp_path / "e2", {"experts": 0.9}, conditions={key: "b"})
    (line,) = (line for line in frame_of(join_folders([tmp_path])).lines if line.first.is_repair)
    assert line.share == pytest.approx(0.8)


def test_gain_and_share_are_over_common_seeds(tmp_path: Path) -> None:
    for seed, repaired in {1: 0.7, 2: 0.8, 3: 0.9}.items():
        rows = {"experts": 0.9, "featcal": repaired} | ({"ties": 0.5} if seed < 3 else {})
        for name, level in rows.items():
            own_seed = None if name == "experts" else seed
            leave_rows(tmp_path / f"{name}{seed}", {name: level}, seed=own_seed)
    (line,) = (line for line in frame_of(join_folders([tmp_path])).lines if line.gain)
    assert line.values["average"] == pytest.approx(0.8) and len(line.rows) == 3
    assert line.gain and (line.gain.value, line.gain.seeds) == (pytest.approx(0.25), 2)
    assert line.share == pytest.approx(0.25 / 0.4)


def test_other_commits_of_a_hub_model_are_other_models(tmp_path: Path) -> None:
    for seed, commit in {1: "aa", 2: "bb"}.items():
        leave_run(tmp_path / str(seed), seed=seed, versions={"org/model": commit, "torch": commit})
    results = join_folders([tmp_path])
    assert results.labels == ["commit of org/model"]
    assert all(len(line.rows) == 1 for line in frame_of(results).lines)
    assert any("different versions of torch" in note.text for note in results.notes)
