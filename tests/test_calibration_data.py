"""Calibration samples and processors of pools, and `method.calibration_data`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical
from fusion_bench.modelpool import CLIPVisionModelPool
from omegaconf import DictConfig, OmegaConf
from PIL import Image
from sample_pools import TEXT_POOLS, Pool, text_batch
from tiny_images import channels_first, picture
from tiny_pools import AVERAGE
from tiny_texts import TASKS, llama_model, sentences, with_data, word_tokenizer, write

import fusion_bench_featcal.fusionbench.compat  # noqa: F401
from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.fusionbench.data import calibration_batches, draw_samples, samples_used
from fusion_bench_featcal.tasks import corrupted

# isort: split
from fusion_bench.modelpool import CausalLMPool

from fusion_bench_featcal.algorithm import FeatCalAlgorithm


def numbered(count: int) -> list[dict]:
    """Items without labels, whose picture shows their number."""
    return [{"image": Image.new("RGB", (4, 4), 3 * (number,))} for number in range(count)]


def settings(**changes: Any) -> FeatCalSettings:
    chosen: dict[str, Any] = {"samples_per_task": 10, "batch_size": 4} | changes
    return FeatCalSettings(**chosen)


def numbers_of(pool: Any, tasks: Any = ("a",), **changes: Any) -> dict[str, list[int]]:
    """The numbers of the pictures in each task's batches."""
    batches = calibration_batches(pool, tasks, settings(**changes), channels_first)
    pixels = {task: torch.cat([b["pixel_values"] for b in batches[task]]) for task in tasks}
    return {t: (values[:, 0, 0, 0] * 255).round().int().tolist() for t, values in pixels.items()}


def test_batches_hold_distinct_samples_in_batch_size():
    pool = Pool(a=numbered(30))
    batches = calibration_batches(pool, ["a"], settings(), channels_first)
    assert [len(batch["pixel_values"]) for batch in batches["a"]] == [4, 4, 2]
    assert len(set(numbers_of(pool)["a"])) == 10


def test_a_tasks_samples_do_not_depend_on_other_tasks_or_batches():
    alone = numbers_of(Pool(a=numbered(50)))["a"]
    pool: Any = Pool(z=numbered(20), a=numbered(50), b=numbered(50))
    assert numbers_of(pool, ("b", "z", "a"))["a"] == alone
    assert numbers_of(pool, ("a", "b"), batch_size=7)["a"] == alone
    assert numbers_of(pool, samples_per_task=20)["a"][:10] == alone
    assert numbers_of(pool, ("a", "b"))["b"] != alone
    assert numbers_of(pool, seed=43)["a"] != alone
    pool.val_dataset_names, pool.load_val_dataset = ["a"], lambda _: numbered(10)
    assert sorted(numbers_of(pool, calibration_split="val")["a"]) == list(range(10))


def test_corrupted_samples_are_the_same_samples_corrupted() -> None:
    rows = [{"image": picture(number)} for number in range(6)]
    change: Any = {"kind": "gaussian_noise", "severity": 3}
    pools = Pool(a=rows), Pool(a=corrupted(rows, *change.values(), seed=5, task="a"))

    def pixels(pool: Pool, **changes: Any) -> torch.Tensor:
        chosen = settings(samples_per_task=4, seed=5, **changes)
        (batch,) = calibration_batches(pool, ["a"], chosen, channels_first)["a"]
        return batch["pixel_values"]

    changed = pixels(pools[0], calibration_corruption=change)
    assert torch.equal(changed, pixels(pools[1]))
    assert not torch.equal(changed, pixels(pools[0]))


@pytest.mark.parametrize("kind", TEXT_POOLS)
def test_texts_are_not_corrupted(kind: str) -> None:
    with pytest.raises(
        CalibrationError, match=r"has texts: set method\.calibration_corruption=null"
    ):
        change = {"kind": "fog", "severity": 1}
        text_batch([{}], kind, calibration_corruption=change)


def test_draw_is_the_same_on_every_machine():
    expected = [55, 45, 44, 90, 39]  # the samples of every published number
    assert draw_samples(100, "mini_mnist", settings(samples_per_task=5)) == expected


def test_fewer_samples_than_requested_are_all_taken_with_one_warning(caplog):
    pool = Pool(a=numbered(9), b=numbered(10))
    assert sorted(numbers_of(pool, ("a", "b"))["a"]) == list(range(9))
    numbers_of(pool)  # a run opens its data more than once
    assert [record.getMessage() for record in caplog.records] == [
        "task a has 9 samples, fewer than method.samples_per_task = 10: all of them are used"
    ]
    assert samples_used(pool, ["a", "c"], 10, "train") == {"a": {"samples": 9, "split": "train"}}


def test_images_of_different_sizes_are_named_when_they_are_read():
    rows = [{"image": picture(n, (4 + (n == 7), 4))} for n in range(10)]
    batches = calibration_batches(Pool(a=rows), ["a"], settings(batch_size=10), channels_first)
    message = r"task 'a'.*processor must return .* one size.*\[3, 4, [45]\].* and \[3, 4, [45]\]"
    with pytest.raises(CalibrationError, match=message):
        list(batches["a"])


LOAD = {"_target_": "fusion_bench_featcal.tasks.load_images", "path": "./nowhere"}
NO_DATA = (
    r"task 'abd' has no calibration data \(nearest: 'abc'\): set modelpool\.train_datasets\.abd or "
    r"method\.calibration_split \(now train\).*are: abc, d"
)
REFUSED: list[tuple[Any, str, dict[str, Any], str]] = [
    (Pool(abc=[], d=[]), "abd", {}, NO_DATA),
    (Pool(a=[]), "a", {"calibration_split": "val"}, "The pool's val_datasets are: none"),
    (Pool(a=[]), "a", {}, r"'a' has 0 samples in modelpool\.train_datasets\.a"),
    *((CLIPVisionModelPool(DictConfig({}), train_datasets=OmegaConf.create({"a": entry})), "a", {},
       rf"(?s)modelpool\.train_datasets\.a.*{message}")
      for entry, message in (
          (LOAD, "cannot be loaded: data './nowhere' does not"),
          ("who/what", "who/what.*HF_HUB_OFFLINE is"))),
]  # fmt: skip


@pytest.mark.parametrize(("pool", "task", "changes", "message"), REFUSED)
def test_data_that_cannot_be_loaded(pool, task, changes, message):
    with pytest.raises(CalibrationError, match=message):
        calibration_batches(pool, [task], settings(**changes), channels_first)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of a base and two experts with their tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("texts"), word_tokenizer()
    names = ["_pretrained_", *TASKS]
    return {n: write(llama_model(k), folder / n, tokenizer) for k, n in enumerate(names)}


def pool_of(models: dict[str, str], *, lazy: bool = False) -> Any:
    tokenizer = models["_pretrained_"]
    return CausalLMPool(OmegaConf.create(models), tokenizer=tokenizer, enable_lazy_loading=lazy)


def calibrated(pool: Any, **settings: Any) -> Any:
    return FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=4, **settings).run(pool)


def test_own_data_give_the_model_of_the_same_data_of_the_pool(models, tmp_path: Path):
    for task in TASKS:
        lines = "\n".join(map(json.dumps, sentences(task)))
        (tmp_path / f"{task}.jsonl").write_text(lines)
    table = {"_target_": "datasets.load_dataset", "path": "json", "split": "train"}
    first, second = (str(tmp_path / f"{task}.jsonl") for task in TASKS)
    lazy = pool_of(models, lazy=True)
    mixed = OmegaConf.create({TASKS[0]: first, TASKS[1]: table | {"data_files": second}})
    model = calibrated(lazy, calibration_data=mixed)
    assert_identical(model, calibrated(with_data(pool_of(models))))
    assert lazy.enable_lazy_loading and lazy._train_datasets is None


def test_missing_and_misspelt_data_are_named(models):
    with pytest.raises(CalibrationError, match=r"task 'one' .*\+method\.calibration_data\.one"):
        calibrated(pool_of(models))
    message = r"calibration_data\.onne is unknown \(nearest: 'one'\)"
    with pytest.raises(ValueError, match=message):
        calibrated(pool_of(models), calibration_data={"onne": "a.jsonl"})
