"""Digests of the data that a cell depends on: the drawn samples, by their content."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_parts import linear
from fusion_bench import BaseModelPool, BaseTaskPool
from omegaconf import OmegaConf
from PIL import Image

from fusion_bench_featcal import FeatCalSettings
from fusion_bench_featcal.calibration_data import draw_samples
from fusion_bench_featcal.lab.compare.data import DataDigests, digest_rows
from fusion_bench_featcal.pools import CausalLMPool

FEATCAL = {"_target_": "fusion_bench_featcal.lab.compare.FeatCal", "samples_per_task": 3}


@pytest.mark.parametrize(
    "rows",
    [
        [{"image": torch.zeros(2, 2), "label": 0}, {"image": torch.ones(2, 2), "label": 1}],
        [(Image.new("RGB", (2, 2)), 0), (Image.new("RGB", (2, 2), "red"), 1)],
        [{"prompt": "a", "target": "b"}, {"prompt": "a", "target": "c"}],
    ],
)
def test_items_count_with_content_and_labels(rows: Any) -> None:
    assert digest_rows(rows) == digest_rows(rows, [0, 1])
    assert len({digest_rows(rows), digest_rows(rows, [0, 0]), digest_rows(rows, [1, 0])}) == 3


def test_files_count_with_their_content(tmp_path: Path) -> None:
    """Files of items, and files that a pool names."""
    image, texts, digests = tmp_path / "a.png", tmp_path / "left.jsonl", set()
    pool = CausalLMPool({}, tokenizer=None, train_datasets={"left": str(texts)})
    for content in ("one", "two"):
        image.write_text(content)
        digests.add(digest_rows([{"image": str(image)}]))
        texts.write_text(json.dumps({"prompt": "a", "target": content}) + "\n")
        digests.add(str(DataDigests(pool, BaseTaskPool()).digests_of_samples(FEATCAL)))
    assert len(digests) == 4


def sample_digests(config: dict[str, Any], train: list[int], test: list[int]) -> dict[str, Any]:
    """Digests of the samples of a method, on data of numbers."""
    models: Any = {"left": linear(1)}
    data = {
        f"{split}_datasets": OmegaConf.create(
            {"left": {"_target_": "comparison_parts.Numbers", "values": values}}
        )
        for split, values in (("train", train), ("test", test))
    }
    return DataDigests(BaseModelPool(models, **data), BaseTaskPool()).digests_of_samples(config)


def test_only_drawn_samples_count() -> None:
    config, values = FEATCAL | {"seed": 7}, list(range(10))
    settings = FeatCalSettings(samples_per_task=3, seed=7)
    before = sample_digests(config, values, [1])
    other = {n: [*values[:n], -1, *values[n + 1 :]] for n in range(10)}
    changed = {n for n in range(10) if sample_digests(config, other[n], [1]) != before}
    assert changed == {*draw_samples(10, "left", settings)}


@pytest.mark.parametrize(
    ("config", "train_counts", "test_counts"),
    [
        ({"_target_": "comparison_parts.Scale"}, True, True),  # its draw is unknown
        ({"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}, False, False),
        ({"name": "clip_layer_wise_adamerging"}, False, True),
        (FEATCAL, True, False),
        (FEATCAL | {"stream": "test_tta"}, False, True),
        ({"a": FEATCAL, "b": FEATCAL | {"calibration_split": "test"}}, True, True),
    ],
)
def test_the_splits_that_a_method_reads_count(
    config: Any, train_counts: bool, test_counts: bool
) -> None:
    before = sample_digests(config, [1, 2], [1, 2])
    assert (sample_digests(config, [1, 3], [1, 2]) != before) == train_counts
    assert (sample_digests(config, [1, 2], [1, 3]) != before) == test_counts
