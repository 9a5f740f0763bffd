"""The builder of the bundled suites from end to end, on a task or two and two steps per phase."""

import json
from dataclasses import replace

import build_suite
import clip_builder
import pytest
import resnet_builder
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
    ResNetForImageClassification,
)

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.suites import image
from fusion_bench_featcal.suites.checksums import check

CLIP, RESNET = "clip-vit-mini", "resnet-mini"
# Classes of base and expert, and the processor; the tasks.
SUITES = {
    CLIP: ((CLIPModel, CLIPVisionModel, CLIPProcessor), image.ALPHABETS2),
    "flan-t5-mini": ((*2 * [AutoModelForSeq2SeqLM], AutoTokenizer), ["clinc_auto"]),
    "llama-mini": ((*2 * [AutoModelForCausalLM], AutoTokenizer), ["clinc_auto"]),
    RESNET: ((*2 * [ResNetForImageClassification], None), image.RESNET3[:2]),
}
EMBEDDINGS = {"shared.weight", "model.embed_tokens.weight"}
HEAD = {"classifier.1.weight", "classifier.1.bias"}


def options(suite: str) -> dict:
    """Few tasks, and a recipe of two steps per phase."""
    recipe = build_suite.BUILDERS[suite].RECIPES[suite]
    tasks, phases = SUITES[suite][1], ("pretraining", "finetuning")
    if suite in (CLIP, RESNET):
        two = {phase: replace(getattr(recipe, phase), steps=2) for phase in phases}
        return {"tasks": tasks, "recipe": replace(recipe, **two, images_per_task=4, expert_batch=4)}
    two = {phase: text_builder.Phase(2, 4, 1e-3, 0.01) for phase in phases}
    return {"tasks": tasks, "recipe": replace(recipe, **two)}


@pytest.fixture(scope="module", autouse=True)
def small():
    """Eight test rows per task, and a ResNet of a few channels."""
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
        size = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}
        patch.setattr(resnet_builder.ResNetBuilder, "size", size)
        yield


@pytest.fixture(scope="module", params=list(SUITES))
def built(request, tmp_path_factory):
    folder, lines = tmp_path_factory.mktemp("suite"), []
    build(folder, request.param, 1, log=lines.append, **options(request.param))
    return folder, request.param, lines


def test_checkpoints_load_in_float32_with_plain_transformers(built):
    folder, suite, _ = built
    (whole, expert, processor), tasks = SUITES[suite]
    if processor is not None:
        processor.from_pretrained(folder / "pretrained")
    for name in ("pretrained", *tasks):
        stored = load_file(folder / name / "model.safetensors")
        assert {t.dtype for t in stored.values() if t.is_floating_point()} == {torch.float16}
        model = (whole if name == "pretrained" else expert).from_pretrained(folder / name)
        kept, loaded = model.state_dict(), dict(model.named_parameters())
        loaded |= {key: value for key, value in model.named_buffers() if key in kept}
        prefix = "" if loaded.keys() <= stored.keys() else "vision_model."  # transformers >= 5.6
        for key, value in loaded.items():
            assert torch.equal(value, stored[prefix + key].to(value.dtype)), key
        assert {v.dtype for v in model.parameters()} == {torch.float32}
        assert len(stored) == len(loaded)


def test_an_expert_changes_no_embedding_no_text_tower_and_no_shared_head(built):
    folder, suite, _ = built
    task = SUITES[suite][1][0]
    base, expert = (load_file(folder / n / "model.safetensors") for n in ("pretrained", task))
    changed = {name for name, tensor in expert.items() if not torch.equal(tensor, base[name])}
    same = expert.keys() - changed
    if suite == RESNET:
        assert same == HEAD
        return
    assert len(changed) > 0.8 * len(expert)
    if suite == CLIP:
        assert expert.keys() == {name for name in base if name.startswith("vision_model.")}
    else:  # the embedding is the head as well
        assert same and not changed & EMBEDDINGS


def test_record_and_checksums(built):
    folder, suite, lines = built
    record = json.loads((folder / "MEASURED.json").read_text(encoding="utf-8"))
    assert record["seed"] == 1
    assert record["recipe"]["pretraining"]["steps"] == 2
    assert record["versions"]["torch"] == torch.__version__
    rows, tasks = record["accuracies"], SUITES[suite][1]
    if suite == CLIP:
        assert list(rows) == ["alphabets2"]
        rows = rows["alphabets2"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    for row in rows.values():
        assert list(row) == [*tasks, "average"]
        assert row["average"] == pytest.approx(sum(row[task] for task in tasks) / len(tasks))
    assert f"{suite}: {tasks[-1]}, 2 steps" in lines
    assert not (folder / build_suite.STAGES).exists()
    assert check(folder) == []


@pytest.mark.parametrize("built", [CLIP, "flan-t5-mini"], indirect=True)
def test_a_stopped_build_resumes_and_gives_the_same_files(built, tmp_path):
    folder, suite, _ = built
    tasks = SUITES[suite][1]

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
    recipe = options(CLIP)["recipe"]
    builder = clip_builder.ClipBuilder("", tmp_path, image.ALPHABETS2, recipe, 0, lambda _: None)
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
    painted = clip_builder.painted_pixels(grey[:4], image.find_task(name))
    # the loader rounds colours to whole steps of 1/255, and .35 is the unit
    torch.testing.assert_close(painted, expected, atol=0.5 / 255 / 0.35 + 1e-5, rtol=0)


def test_unknown_tasks_and_folders_in_use_are_refused_before_training(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    words = ["suite", "build", "--out", str(tmp_path / "new"), "--suite"]
    for suite, task, kind in ((CLIP, "mini_nothing", "image"), ("llama-mini", "trec", "text")):
        assert main([*words, suite, "--task", task]) == 2
        assert f"no {kind} task {task!r}" in capsys.readouterr().err
    assert main(["suite", "build", "--suite", CLIP, "--out", str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no suite 'gpt-mini'; there are clip-vit-mini"):
        build(tmp_path / "new", "gpt-mini")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
