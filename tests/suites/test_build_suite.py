"""The builder of the bundled suites from end to end, on a task or two and two steps per phase."""

import json
from dataclasses import replace
from hashlib import sha256

import build_suite
import pytest
import resnet_builder
import text_builder
import torch
from build_suite import build, main
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

from fusion_bench_featcal.suites import image

CLIP, RESNET, LLAMA = "clip-vit-mini", "resnet-mini", "llama-mini"
# Classes of base and expert, and the processor; the tasks.
SUITES = {
    CLIP: ((CLIPModel, CLIPVisionModel, CLIPProcessor), image.ALPHABETS2),
    "flan-t5-mini": ((*2 * [AutoModelForSeq2SeqLM], AutoTokenizer), ["clinc_auto"]),
    LLAMA: ((*2 * [AutoModelForCausalLM], AutoTokenizer), ["clinc_auto"]),
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
        size = {"embedding_size": 4, "hidden_sizes": [4, 4, 8]}
        patch.setattr(resnet_builder.ResNetBuilder, "CHANGES", size)
        yield


@pytest.mark.parametrize(
    "suite", [pytest.param(s, marks=[pytest.mark.slow] * (s == LLAMA)) for s in SUITES]
)
def test_a_built_suite_is_whole_and_experts_keep_what_is_shared(suite, tmp_path):
    build(tmp_path, suite, 1, log=lambda _: None, **options(suite))
    (whole, expert, processor), tasks = SUITES[suite]
    if processor is not None:
        processor.from_pretrained(tmp_path / "pretrained")
    stored = {n: load_file(tmp_path / n / "model.safetensors") for n in ("pretrained", *tasks)}
    for name, tensors in stored.items():
        assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.float16}
        model = (whole if name == "pretrained" else expert).from_pretrained(tmp_path / name)
        prefix = "" if model.state_dict().keys() & tensors.keys() else "vision_model."
        for key, value in model.named_parameters():  # in float32
            assert torch.equal(value, tensors[prefix + key].float()), key
    base, first = stored["pretrained"], stored[tasks[0]]
    unchanged = {name for name, tensor in first.items() if torch.equal(tensor, base[name])}
    assert len(unchanged) < 0.2 * len(first)
    if suite == RESNET:
        assert unchanged == HEAD
    elif suite == CLIP:
        assert first.keys() == {name for name in base if name.startswith("vision_model.")}
    else:  # the embedding is the head as well
        assert unchanged & EMBEDDINGS
    record = json.loads((tmp_path / "MEASURED.json").read_text(encoding="utf-8"))
    assert (record["seed"], record["recipe"]["pretraining"]["steps"]) == (1, 2)
    rows = record["accuracies"]["alphabets2"] if suite == CLIP else record["accuracies"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    assert {tuple(row) for row in rows.values()} == {(*tasks, "average")}
    for line in (tmp_path / "SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        assert sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_unknown_tasks_and_folders_in_use_are_refused_before_training(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    words = ["--suite", CLIP, "--out"]
    with pytest.raises(ValueError, match="no task of clip-vit-mini 'mini_nothing'"):
        main([*words, str(tmp_path / "new"), "--task", "mini_nothing"])
    with pytest.raises(FileExistsError, match="is not empty"):
        main([*words, str(tmp_path)])
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
