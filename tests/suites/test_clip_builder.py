"""The builder from end to end, on two tasks and one step a phase."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import CLIPModel, CLIPProcessor, CLIPVisionModel

from fusion_bench_featcal.suites.checksums import check
from fusion_bench_featcal.suites.clip_builder import build
from fusion_bench_featcal.suites.clip_training import Recipe
from fusion_bench_featcal.suites.image import ALPHABETS2

TOY = Recipe(
    pretraining=replace(Recipe().pretraining, steps=2),
    finetuning=replace(Recipe().finetuning, steps=2),
    tasks_per_step=2,
    images_per_task=4,
    expert_batch=4,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    lines = []
    build(folder, seed=1, tasks=ALPHABETS2, recipe=TOY, log=lines.append)
    return folder, lines


def test_it_leaves_checkpoints_that_load_in_float32_with_plain_transformers(built):
    folder, _ = built
    model = CLIPModel.from_pretrained(folder / "pretrained")
    CLIPProcessor.from_pretrained(folder / "pretrained")
    for task in ALPHABETS2:
        expert = CLIPVisionModel.from_pretrained(folder / task)
        stored = load_file(folder / task / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
        assert {p.dtype for p in [*expert.parameters(), *model.parameters()]} == {torch.float32}
        base = load_file(folder / "pretrained" / "model.safetensors")
        assert {name: t.shape for name, t in stored.items()} == {
            name: t.shape for name, t in base.items() if name.startswith("vision_model.")
        }


def test_it_records_seed_recipe_versions_and_accuracies(built):
    folder, lines = built
    record = json.loads((folder / "MEASURED.json").read_text(encoding="utf-8"))
    assert record["seed"] == 1
    assert record["recipe"]["pretraining"]["steps"] == 2
    assert record["versions"]["torch"] == torch.__version__
    rows = record["accuracies"]["alphabets2"]
    assert list(record["accuracies"]) == ["alphabets2"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    for row in rows.values():
        assert list(row) == [*ALPHABETS2, "average"]
        assert row["average"] == pytest.approx(sum(row[task] for task in ALPHABETS2) / 2)
    assert any("expert mini_korean" in line for line in lines)


def test_its_checksums_hold(built):
    assert check(built[0]) == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_files_and_another_does_not(built, tmp_path):
    folder, _ = built
    # two steps under another seed start from other weights; nothing else tells the two builds apart
    for seed, same in ((1, True), (2, False)):
        build(tmp_path / str(seed), seed, tasks=ALPHABETS2, recipe=TOY, log=lambda _: None)
        for name in ("pretrained", *ALPHABETS2):
            mine, theirs = (
                load_file(place / name / "model.safetensors")
                for place in (folder, tmp_path / str(seed))
            )
            assert all(torch.equal(mine[key], theirs[key]) for key in mine) is same


def test_a_folder_in_use_and_an_unknown_task_are_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty"):
        build(tmp_path, tasks=ALPHABETS2, recipe=TOY)
    with pytest.raises(ValueError, match="no task 'cifar10'"):
        build(tmp_path / "new", tasks=["cifar10"], recipe=TOY)
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
