"""The builder of the bundled suites from end to end, on a task or two and two steps a phase."""

import json
from dataclasses import replace

import build_suite
import clip_builder
import pytest
import text_builder
import torch
from build_suite import build
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    CLIPModel,
    CLIPProcessor,
    CLIPVisionModel,
)

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.checksums import check
from fusion_bench_featcal.suites.image import ALPHABETS2

LOADERS = {
    "clip-vit-mini": (CLIPModel, CLIPVisionModel, CLIPProcessor),
    "flan-t5-mini": (AutoModelForSeq2SeqLM, AutoModelForSeq2SeqLM, AutoTokenizer),
    "llama-mini": (AutoModelForCausalLM, AutoModelForCausalLM, AutoTokenizer),
}


def options(suite: str) -> dict:
    """Few tasks, and a recipe of two steps a phase."""
    recipe = build_suite.BUILDERS[suite].RECIPES[suite]
    if suite != "clip-vit-mini":
        phases = {p: text_builder.Phase(2, 4, 1e-3, 0.01) for p in ("pretraining", "finetuning")}
        return {"tasks": ["clinc_auto"], "recipe": replace(recipe, **phases)}
    phases = {p: replace(getattr(recipe, p), steps=2) for p in ("pretraining", "finetuning")}
    small = {"images_per_task": 4, "expert_batch": 4}  # fewer tasks than the recipe's a step
    return {"tasks": ALPHABETS2, "recipe": replace(recipe, **phases, **small)}


@pytest.fixture(scope="module", autouse=True)
def few_test_rows():
    load, pictures_of = text_builder.load_text_split, image.load_split

    def shorter(name: str, split: str):
        rows = load(name, split)
        return rows.select(range(8)) if split == "test" else rows

    def fewer(name: str, split: str):
        pictures = pictures_of(name, split)
        if split == "test":
            pictures.grey, pictures.labels = pictures.grey[:8], pictures.labels[:8]
        return pictures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_builder, "load_text_split", shorter)
        patch.setattr(image, "load_split", fewer)
        yield


@pytest.fixture(scope="module", params=list(LOADERS))
def built(request, tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("suite"), []
    build(folder, request.param, 1, log=lines.append, **options(request.param))
    return folder, request.param, lines


def test_checkpoints_load_in_float32_with_plain_transformers(built):
    folder, suite, _ = built
    whole, expert, processor = LOADERS[suite]
    processor.from_pretrained(folder / "pretrained")
    for name in ("pretrained", *options(suite)["tasks"]):
        stored = load_file(folder / name / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
        model = (whole if name == "pretrained" else expert).from_pretrained(folder / name)
        loaded = dict(model.named_parameters())
        prefix = "" if loaded.keys() <= stored.keys() else "vision_model."  # transformers >= 5.6
        for key, parameter in loaded.items():
            assert torch.equal(parameter, stored[prefix + key].float()), key
        assert len(stored) == len(loaded)


def test_an_expert_changes_no_embedding_and_no_text_tower(built):
    folder, suite, _ = built
    tasks = options(suite)["tasks"]
    base, expert = (load_file(folder / n / "model.safetensors") for n in ("pretrained", tasks[0]))
    changed = {name for name, tensor in expert.items() if not torch.equal(tensor, base[name])}
    assert len(changed) > 0.8 * len(expert)
    if suite == "clip-vit-mini":
        assert expert.keys() == {name for name in base if name.startswith("vision_model.")}
    else:
        assert len(expert.keys() - changed) >= 1  # the embedding, which is the head as well
        assert not changed & {"shared.weight", "model.embed_tokens.weight"}


def test_record_and_checksums(built):
    folder, suite, lines = built
    record = json.loads((folder / "MEASURED.json").read_text(encoding="utf-8"))
    assert record["seed"] == 1
    assert record["recipe"]["pretraining"]["steps"] == 2
    assert record["versions"]["torch"] == torch.__version__
    rows, tasks = record["accuracies"], options(suite)["tasks"]
    if suite == "clip-vit-mini":
        assert list(rows) == ["alphabets2"]
        rows = rows["alphabets2"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    for row in rows.values():
        assert list(row) == [*tasks, "average"]
        assert row["average"] == pytest.approx(sum(row[task] for task in tasks) / len(tasks))
    assert f"{suite}: {tasks[-1]}, 2 steps" in lines
    assert not (folder / build_suite.STAGES).exists()
    assert check(folder) == []


def test_a_stopped_build_resumes_and_gives_the_same_files(built, tmp_path):
    folder, suite, _ = built
    tasks = options(suite)["tasks"]

    def stop(line: str) -> None:
        if tasks[0] in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "new", suite, 1, log=stop, **options(suite))
    with pytest.raises(FileExistsError, match="is not empty"):
        build(tmp_path / "new", suite, 2, **options(suite))
    lines = []
    build(tmp_path / "new", suite, 1, log=lines.append, **options(suite))
    assert f"{suite}: pretrained was finished before" in lines
    listed, again = ((f / "SHA256SUMS").read_text() for f in (folder, tmp_path / "new"))
    assert listed == again


def test_pretraining_caps_the_logit_scale(tmp_path):
    recipe = options("clip-vit-mini")["recipe"]
    builder = clip_builder.ClipBuilder("", tmp_path, ALPHABETS2, recipe, 0, lambda _: None)
    model = builder.new_model()
    model.logit_scale.data.fill_(9.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    builder.pretrain(model)
    changed = {n for n, value in model.state_dict().items() if not torch.equal(value, before[n])}
    assert {name.split(".")[0] for name in changed} >= {"vision_model", "text_model", "logit_scale"}
    assert 29.9 < model.logit_scale.exp().item() < 30.001


@pytest.mark.parametrize("name", image.ALL8)
def test_painted_pixels_are_those_of_loader_and_processor(name):
    grey, _ = clip_builder.load_training_set(name)
    items = [image.load_split(name, "train")[index]["image"] for index in range(4)]
    expected = image.load_processor()(images=items, return_tensors="pt")["pixel_values"]
    ours = clip_builder.painted_pixels(grey[:4], image.find_task(name))
    # the loader rounds colours to whole steps of 1/255, and .35 is the unit
    torch.testing.assert_close(ours, expected, atol=0.5 / 255 / 0.35 + 1e-5, rtol=0)


@pytest.mark.parametrize(
    ("suite", "task"), [("clip-vit-mini", "mini_nothing"), ("llama-mini", "trec")]
)
def test_unknown_tasks_and_folders_in_use_are_refused_before_training(
    suite, task, tmp_path, capsys
):
    (tmp_path / "mine.txt").write_text("keep")
    words = ["suite", "build", "--suite", suite, "--out"]
    assert main([*words, str(tmp_path / "new"), "--task", task]) == 2
    assert f"no {'image' if task[0] == 'm' else 'text'} task {task!r}" in capsys.readouterr().err
    assert main([*words, str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no suite 'gpt-mini'; there are clip-vit-mini"):
        build(tmp_path / "new", "gpt-mini")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
