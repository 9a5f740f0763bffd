"""Attacks by data: labels, batches and samples."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from calibrations import distance, run_fast, run_slow
from oracle import Knobs
from PIL import Image
from tiny_images import picture
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite

from attacks.judging import REFUSED, RIGHT, captured_log, case, expect, expect_warning
from attacks.worlds import World, calibrated, expect_finite
from fusion_bench_featcal import FeatCalSettings, calibrate
from fusion_bench_featcal.tasks import load_images

# --- labels ---


def _numbered_folders(folder: Path, names: list[str]) -> Path:
    """A folder for each name, with a picture whose grey value is the name's position."""
    for position, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        Image.new("RGB", (8, 8), (20 * position,) * 3).save(folder / name / "a.png")
    return folder


def _labels(items: Any) -> dict[int, int]:
    """Position of the folder an item came from -> the item's label."""
    found = (items[index] for index in range(len(items)))
    return {np.array(item["image"])[0, 0, 0].item() // 20: item["label"] for item in found}


_WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kiwi", "lynx"]
_NUMBERS: Mapping[str, list[str]] = {
    "0 to 11": [str(number) for number in range(12)],
    "1 to 12": [str(number + 1) for number in range(12)],
    "with zeros before some": ["0", "01", "2", "03", "4", "5", "06", "7", "8", "9", "10", "11"],
}
for _name, _folders in _NUMBERS.items():
    # Numbers that do not start at 0 may be refused: they may count from 1, or have a gap.
    @case(f"labels: folders {_name} with classnames", "classnames",
          must="either" if _name == "1 to 12" else RIGHT)  # fmt: skip
    def _(folder: Path, names: list[str] = _folders) -> None:
        data = _numbered_folders(folder / "data", names)
        found = _labels(load_images(str(data), classnames=_WORDS))
        wrong = [place for place, label in found.items() if place != label]
        expect(not wrong, f"{len(wrong)} of 12 classes are swapped: folder 10 is {found[10]}")


@case("labels: folders 0 to 11 without classnames", must=RIGHT)
def _(folder: Path) -> None:
    data = _numbered_folders(folder / "data", _NUMBERS["0 to 11"])
    items = load_images(str(data))
    found = _labels(items)
    names = items.classnames or []
    expect(all(names[label] == str(n) for n, label in found.items()), "names swapped")
    expect(names == _NUMBERS["0 to 11"], f"sorted as {names}")


@case("labels: folders and classnames share no name", "classnames", "order", must=REFUSED)
def _(folder: Path) -> None:
    data = _numbered_folders(folder / "data", ["alpha", "beta", "gamma"])
    load_images(str(data), classnames=["cat", "dog", "eel"])


@case("labels: folders and classnames share no name, in a task pool", "classnames", "order", "one",
      must=REFUSED)  # fmt: skip
def _(folder: Path) -> None:
    world = World(folder)
    world.modelpool["default_taskpool"]["tasks"]["one"]["classnames"] = ["cat", "dog", "eel"]
    world.command().succeeded()


@case("labels: class list of a table and classnames share no name", "classnames", "order",
      must=REFUSED)  # fmt: skip
def _(folder: Path) -> None:
    from fusion_bench_featcal.data.images import ImageItems

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["alpha", "beta"])}
    )
    rows = datasets.Dataset.from_dict({"image": [picture(1)], "label": [1]}, features=features)
    ImageItems(rows, name="data", classnames=["cat", "dog"])


@case("labels: folders that are the classnames in another order", must=RIGHT)
def _(folder: Path) -> None:
    names = ["cat", "ant", "bee"]
    found = _labels(load_images(str(_numbered_folders(folder / "data", names)), classnames=_WORDS))
    expect(found == {0: 2, 1: 0, 2: 1}, f"labels {found}")


# --- batches ---


@case("batches: a bare tensor instead of batches", "task_0", "batch", must=REFUSED)
def _(folder: Path) -> None:
    suite = residual_suite()
    inputs = {task: torch.cat(batches) for task, batches in suite.inputs.items()}
    family = {"name": "replay", "blocks": suite.blocks}
    settings = FeatCalSettings(samples_per_task=15)
    calibrate(suite.merged, suite.base, suite.experts, inputs, settings, family, progress=False)


def _gpt2(change: Callable[[torch.Tensor], torch.Tensor]) -> Suite:
    suite = gpt2_suite()
    batch = suite.inputs["task_1"][0]
    batch["input_ids"] = change(batch["input_ids"])
    return suite


_TOKENS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "floats with fractions": lambda ids: ids.double() + 0.75 * (ids > 0),
    "whole floats": lambda ids: ids.double(),
    "beyond the vocabulary": lambda ids: torch.where(ids > 0, ids + 30, ids),
    "negative": lambda ids: torch.where(ids > 0, -ids, ids),
}
for _name, _change in _TOKENS.items():

    @case(f"batches: token ids that are {_name}", "task_1", "token|input_ids", must=REFUSED)
    def _(folder: Path, change: Callable[[torch.Tensor], torch.Tensor] = _change) -> None:
        suite = _gpt2(change)
        run_fast(suite, family={"name": "replay", "blocks": ["h.*"]})


@case("batches: token ids beyond the vocabulary, from a pool", "one|two", "token", must=REFUSED)
def _(folder: Path) -> None:
    from text_pools import text_pool
    from tiny_texts import WORDS, word_tokenizer

    pool = text_pool("causal", folder)
    pool._tokenizer = word_tokenizer(words=("<pad>", "</s>", "<unk>", *"zyxwvu", *WORDS[3:]))
    calibrated(pool)


@case("batches: token ids with fractions, from a pool", "one", "item", "input_ids", must=REFUSED)
def _(folder: Path) -> None:
    from text_pools import text_pool

    pool = text_pool("causal", folder)
    rows = [{"input_ids": [3.75, 4.5, 5.25], "attention_mask": [1, 1, 1], "labels": [3, 4, 5]}] * 4
    pool.load_train_dataset = lambda task: rows
    calibrated(pool)


@case("batches: NaN among the pixels", "task_1", "NaN|finite", must=REFUSED)
def _(folder: Path) -> None:
    suite = clip_suite()
    suite.inputs["task_1"][0]["pixel_values"][0, 0, 0, 0] = float("nan")
    run_fast(suite)


# --- samples ---


@case("samples: a task has fewer than asked, in Python", must=RIGHT)
def _(folder: Path) -> None:
    suite = clip_suite(tasks=2)
    suite.inputs["task_1"] = suite.inputs["task_1"][:1]
    with captured_log() as messages:
        found = run_fast(suite, samples_per_task=7).model
    expect_warning(messages, "task_1", "4")
    gap = distance(found, run_slow(suite, Knobs(eps=1e-8)).model)
    expect(gap < 1e-8, f"off by {gap:.0e} from the oracle")


@case("samples: a task has fewer than asked, in a pool", must=RIGHT)
def _(folder: Path) -> None:
    world = World(folder)
    for path in sorted(world.data("two", "train").rglob("*.png"))[5:]:
        path.unlink()
    with captured_log() as messages:
        expect_finite(world.run(samples_per_task=12))
    expect_warning(messages, "two", "5", "12")


@case("samples: text settings on images", must=RIGHT)
def _(folder: Path) -> None:
    with captured_log() as messages:
        World(folder).run(max_length=10, generated_tokens=7)
    expect_warning(messages, "max_length")
    expect_warning(messages, "generated_tokens")


@case("samples: rho 1 is the same with a base and without", must=RIGHT)
def _(folder: Path) -> None:
    suite, knobs = clip_suite(tasks=2), Knobs(rho=1.0, eps=1e-8)
    wanted = run_slow(suite, knobs).model
    for has_base in (True, False):
        gap = distance(run_fast(suite, knobs, has_base=has_base).model, wanted)
        expect(gap < 1e-9, f"{'with' if has_base else 'without'} base: off by {gap:.0e}")


@case("samples: the oracle agrees on an untouched suite", must=RIGHT)
def _(folder: Path) -> None:
    suite = clip_suite()
    gap = distance(run_fast(suite).model, run_slow(suite, Knobs(eps=1e-8)).model)
    expect(gap < 1e-9, f"off by {gap:.0e}")
