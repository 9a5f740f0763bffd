"""The builder of the text suites from end to end, on one task and two steps a phase."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from fusion_bench_featcal.suites import text_builder, text_measure
from fusion_bench_featcal.suites.checksums import check
from fusion_bench_featcal.suites.text_builder import build
from fusion_bench_featcal.suites.text_training import RECIPES, Phase

TASK = "clinc_auto"
LOADERS = {"flan-t5-mini": AutoModelForSeq2SeqLM, "llama-mini": AutoModelForCausalLM}


def toy(suite: str):
    return replace(
        RECIPES[suite], pretraining=Phase(2, 4, 1e-3, 0.05), finetuning=Phase(2, 4, 1e-3, 0.01)
    )


def few_rows(monkeypatch):
    load = text_measure.load_text_split
    monkeypatch.setattr(
        text_measure, "load_text_split", lambda name, split: load(name, split).select(range(8))
    )


@pytest.fixture(scope="module", params=list(LOADERS))
def built(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    lines = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        few_rows(monkeypatch)
        build(folder, request.param, 1, tasks=[TASK], recipe=toy(request.param), log=lines.append)
    return folder, request.param, lines


def test_it_leaves_checkpoints_that_load_in_float32_with_plain_transformers(built):
    folder, suite, _ = built
    names = {}
    for name in ("pretrained", TASK):
        model = LOADERS[suite].from_pretrained(folder / name)
        stored = load_file(folder / name / "model.safetensors")
        assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        assert head.weight is embedding.weight
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter, stored[key].float()), key
        names[name] = set(stored)
    assert names["pretrained"] == names[TASK]
    assert len(AutoTokenizer.from_pretrained(folder / "pretrained")) == model.config.vocab_size


def test_an_expert_changes_everything_but_the_embedding(built):
    folder, suite, _ = built
    base, expert = (LOADERS[suite].from_pretrained(folder / name) for name in ("pretrained", TASK))
    embedding = base.get_input_embeddings().weight
    assert torch.equal(embedding, expert.get_input_embeddings().weight)
    changed = [
        not torch.equal(a, b) for a, b in zip(base.parameters(), expert.parameters(), strict=True)
    ]
    assert sum(changed) > 0.8 * (len(changed) - 1)


def test_it_records_seed_recipe_versions_and_accuracies_and_its_checksums_hold(built):
    folder, suite, lines = built
    record = json.loads((folder / "MEASURED.json").read_text(encoding="utf-8"))
    assert record["seed"] == 1
    assert record["recipe"]["pretraining"]["steps"] == 2
    assert record["versions"]["torch"] == torch.__version__
    rows = record["accuracies"]
    assert list(rows) == ["base", "experts", "simple_average", "task_arithmetic"]
    for row in rows.values():
        assert list(row) == [TASK, "average"]
    assert f"{suite}: {TASK}, 2 steps" in lines
    assert not (folder / text_builder.STAGES).exists()
    assert check(folder) == []


def test_a_stopped_build_goes_on_and_gives_the_same_files(built, tmp_path, monkeypatch):
    folder, suite, _ = built
    few_rows(monkeypatch)
    options = {"tasks": [TASK], "recipe": toy(suite)}

    def stop(line: str) -> None:
        if TASK in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "new", suite, 1, log=stop, **options)
    with pytest.raises(FileExistsError, match="is not empty"):
        build(tmp_path / "new", suite, 2, **options)
    lines = []
    build(tmp_path / "new", suite, 1, log=lines.append, **options)
    assert f"{suite}: pretrained was finished before" in lines
    for name in ("pretrained", TASK):
        ours, theirs = (load_file(place / name / "model.safetensors") for place in
                        (folder, tmp_path / "new"))  # fmt: skip
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_folder_in_use_and_unknown_names_are_refused(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="is not empty"):
        build(tmp_path, "llama-mini", tasks=[TASK])
    with pytest.raises(ValueError, match="no task 'trec'"):
        build(tmp_path / "new", "llama-mini", tasks=["trec"])
    with pytest.raises(ValueError, match="no text suite 'gpt-mini'; there are flan-t5-mini"):
        build(tmp_path / "new", "gpt-mini")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine.txt"]
