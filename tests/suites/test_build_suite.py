"""The builder of the bundled suites from end to end, on a task or two and two steps per phase."""

import json
from dataclasses import replace

import build_suite
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
    folder = tmp_path_factory.mktemp("suite")
    build(folder, request.param, 1, log=lambda _: None, **options(request.param))
    return folder, request.param


def test_checkpoints_load_in_float32_and_experts_keep_what_is_shared(built):
    folder, suite = built
    (whole, expert, processor), tasks = SUITES[suite]
    if processor is not None:
        processor.from_pretrained(folder / "pretrained")
    stored = {n: load_file(folder / n / "model.safetensors") for n in ("pretrained", *tasks)}
    for name, tensors in stored.items():
        assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float16}
        model = (whole if name == "pretrained" else expert).from_pretrained(folder / name)
        prefix = "" if model.state_dict().keys() & tensors.keys() else "vision_model."
        for key, value in model.named_parameters():
            assert torch.equal(value, tensors[prefix + key].float()), key
    base, expert = stored["pretrained"], stored[tasks[0]]
    unchanged = {name for name, tensor in expert.items() if torch.equal(tensor, base[name])}
    if suite == RESNET:
        assert unchanged == HEAD
        return
    assert len(unchanged) < 0.2 * len(expert)
    if suite == CLIP:
        assert expert.keys() == {name for name in base if name.startswith("vision_model.")}
    else:  # the embedding is the head as well
        assert unchanged & EMBEDDINGS


def test_record_and_checksums(built):
    folder, suite = built
    record = json.loads((folder / "MEASURED.json").read_text(encoding="utf-8"))
    assert (record["seed"], record["recipe"]["pretraining"]["steps"]) == (1, 2)
    rows = record["accuracies"]["alphabets2"] if suite == CLIP else record["accuracies"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    for row in rows.values():
        assert list(row) == [*SUITES[suite][1], "average"]
    assert not (folder / build_suite.STAGES).exists()
    assert check(folder) == []


@pytest.mark.parametrize("built", [CLIP], indirect=True)
def test_a_stopped_build_resumes_and_gives_the_same_files(built, tmp_path):
    folder, suite = built
    tasks = SUITES[suite][1]

    def stop(line: str) -> None:
        if tasks[0] in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "new", suite, 1, log=stop, **options(suite))
    lines = []
    build(tmp_path / "new", suite, 1, log=lines.append, **options(suite))
    assert f"{suite}: pretrained was finished before" in lines
    listed, again = ((f / "SHA256SUMS").read_text() for f in (folder, tmp_path / "new"))
    assert listed == again


def test_unknown_tasks_and_folders_in_use_are_refused_before_training(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("keep")
    words = ["suite", "build", "--suite", CLIP, "--out"]
    assert main([*words, str(tmp_path / "new"), "--task", "mini_nothing"]) == 2
    assert "no image task 'mini_nothing'" in capsys.readouterr().err
    assert main([*words, str(tmp_path)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
