"""A fingerprint changes with everything that a result depends on, and with nothing else."""

import logging
import os
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from comparison_parts import linear, model_pool
from fusion_bench import BaseModelPool, BaseTaskPool
from omegaconf import OmegaConf
from PIL import Image

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.calibration_data import draw_samples
from fusion_bench_featcal.lab.compare.data import DataDigests, digest_rows
from fusion_bench_featcal.lab.compare.fingerprint import (
    FileDigests,
    describe_pool,
    fingerprint,
)


def test_order_of_keys_does_not_count_but_values_do() -> None:
    known = fingerprint({"a": 1, "b": [1, 2]})
    assert fingerprint({"b": [1, 2], "a": 1}) == known
    assert fingerprint(OmegaConf.create({"a": 1, "b": [1, 2]})) == known
    assert fingerprint({"a": 1, "b": [2, 1]}) != known
    assert fingerprint({"a": 1.5, "b": [1, 2]}) != known
    assert fingerprint({"a": True, "b": [1, 2]}) != known
    interpolated = OmegaConf.create({"seed": 1, "cell": {"a": "${seed}", "b": [1, 2]}})
    assert fingerprint(interpolated.cell) == known


def test_changed_model_file_counts(tmp_path: Path) -> None:
    def pool() -> Any:
        return BaseModelPool(OmegaConf.create({"expert": str(tmp_path)}))

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    known = fingerprint(describe_pool(pool(), FileDigests()))
    assert fingerprint(describe_pool(pool(), FileDigests())) == known
    file = tmp_path / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_bytes(b"weightz")  # of the same size and time
    os.utime(file, ns=times)
    assert fingerprint(describe_pool(pool(), FileDigests())) != known


def test_folders_that_are_written_to_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    config = {"save_path": str(tmp_path), "model": {"cache_dir": str(tmp_path)}}
    assert FileDigests().named_in(config) == {}
    assert list(FileDigests().named_in({"tokenizer": str(tmp_path)})) == [str(tmp_path)]


@pytest.mark.parametrize(
    "rows",
    [
        [{"image": torch.zeros(2, 2), "label": 0}, {"image": torch.ones(2, 2), "label": 1}],
        [(Image.new("RGB", (2, 2)), 0), (Image.new("RGB", (2, 2), "red"), 1)],
        [{"prompt": "a", "target": "b"}, {"prompt": "a", "target": "c"}],
        datasets.Dataset.from_dict(
            {"image": [Image.new("L", (2, 2)), Image.new("L", (2, 2), 3)], "label": [0, 1]},
            features=datasets.Features(
                {"image": datasets.Image(), "label": datasets.Value("int8")}
            ),
        ),
    ],
)
def test_items_count_with_content_and_labels(rows: Any) -> None:
    assert digest_rows(rows) == digest_rows(rows, [0, 1])
    assert len({digest_rows(rows), digest_rows(rows, [0, 0]), digest_rows(rows, [1, 0])}) == 3


def test_items_that_are_files_count_with_their_bytes(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"one")
    known = digest_rows([{"image": str(file)}])
    file.write_bytes(b"two")
    assert digest_rows([{"image": str(file)}]) != known


class Rows(torch.utils.data.Dataset):
    """Texts that are numbers."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return {"value": self.values[index]}


def drawn(values: list[int], **config: Any) -> dict[str, Any]:
    data = {"left": {"_target_": "test_fingerprint.Rows", "values": values}}
    models: Any = {"left": linear(1)}
    pool = BaseModelPool(models, train_datasets=OmegaConf.create(data))
    return DataDigests(pool, BaseTaskPool()).drawn(config)


def test_only_drawn_samples_count() -> None:
    config = {"_target_": "fusion_bench_featcal.lab.compare.FeatCal", "samples_per_task": 3}
    values = list(range(10))
    (index, *_) = draw_samples(10, "left", FeatCalSettings(samples_per_task=3))
    known = drawn(values, **config)
    other = {n: [*values[:n], -1, *values[n + 1 :]] for n in range(10)}
    changed = [n for n in range(10) if drawn(other[n], **config) != known]
    assert index in changed and len(changed) == 3


def test_samples_of_a_method_that_tells_no_draw_count_all() -> None:
    config = {"_target_": "comparison_parts.Scale"}
    known = drawn([1, 2], **config)
    assert drawn([1, 3], **config) != known
    average = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
    assert drawn([1, 2], **average) == drawn([1, 3], **average) == {}


def corrupted_greek(**keys: Any) -> dict[str, Any]:
    """Digests of what FeatCal would draw from corrupted images of a bundled task."""
    load = {"_target_": "fusion_bench_featcal.suites.image.load_split", "task": "mini_greek"}
    clean = {**load, "split": "train"}
    entry = clean
    if keys:
        entry = {"_target_": "fusion_bench_featcal.tasks.corrupted", "data": clean, **keys}
    models: Any = {"left": linear(1)}
    pool = BaseModelPool(models, train_datasets=OmegaConf.create({"left": entry}))
    config = {"_target_": "fusion_bench_featcal.lab.compare.FeatCal", "samples_per_task": 3}
    return DataDigests(pool, BaseTaskPool()).drawn(config)


def test_corrupted_samples_are_other_data(caplog: pytest.LogCaptureFixture) -> None:
    fog = {"corruption": "fog", "severity": 1}
    entries = [{}, fog, fog | {"severity": 2}, fog | {"seed": 1}, fog | {"task": "left"}]
    entries += [fog | {"corruption": name} for name in ("gaussian_noise", "motion_blur")]
    known = [corrupted_greek(**keys) for keys in entries]
    assert len({str(digests) for digests in known}) == len(entries)
    assert known == [corrupted_greek(**keys) for keys in entries]
    assert "counts in fingerprints by class" not in caplog.text


def test_test_items_count(caplog: pytest.LogCaptureFixture) -> None:
    def tested(values: list[int]) -> dict[str, Any]:
        pool: Any = BaseTaskPool()
        pool._test_datasets = {"left": Rows(values)}
        return DataDigests(model_pool(), pool).tested()

    assert tested([1, 2]) == tested([1, 2]) != tested([1, 3])
    with caplog.at_level(logging.INFO):
        assert DataDigests(model_pool(), BaseTaskPool()).tested() == {}
    assert "does not show its test items" in caplog.text


def test_items_without_content_count_by_length_and_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool: Any = BaseTaskPool()
    pool._test_datasets = {"left": [object(), object()]}
    known = {"class": "list", "length": 2, "config": None}
    assert DataDigests(model_pool(), pool).tested() == {"left": known}
    assert "left counts in fingerprints by class, length and config: " in caplog.text
