"""`featcal calibrate`: the models that a recipe names, and whether they belong together."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_folders import llama_folders, write_adapters
from test_calibrate_command import words
from tiny_models import scatter
from tiny_texts import TASKS, word_tokenizer, write
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders.model_folder import ModelFolder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models and texts; the command ends where a model is loaded whole."""
    llama_folders(tmp_path)

    def load(self: ModelFolder, kind: Any = None) -> None:
        raise ValueError("all checks have passed")

    monkeypatch.setattr(ModelFolder, "load", load)
    return tmp_path


def recipe(folder: Path, method: str, base: str | None, *models: str) -> None:
    content = {"merge_method": method, "models": [{"model": model} for model in models]}
    content |= {} if base is None else {"base_model": base}
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))


def calibrate(folder: Path, *more: str, names: tuple[str, ...] = TASKS) -> list[str]:
    """The command's words without models; `names` are those of the experts."""
    data = [f"{name}={folder / task}.jsonl" for name, task in zip(names, TASKS, strict=True)]
    named = [word for pair in data for word in ("--data", pair)]
    return ["calibrate", str(folder / "merged"), "--out", str(folder / "out"), *named, *more]


def shown(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """Everything that the command prints once all checks have passed."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert "all checks have passed" in printed.err, printed.err
    return printed.out


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (("./math/final", "./code/final"), ("math-final", "code-final")),
        (
            ("a/x/checkpoint-500", "b/x/checkpoint-500/"),
            ("a-x-checkpoint-500", "b-x-checkpoint-500"),
        ),
        (("math/final", "code"), ("final", "code")),
        (("math-x/final", "math/x-final"), ("final", "x-final")),
    ],
)
def test_experts_have_the_shortest_names_that_differ(folder, capsys, monkeypatch, places, names):
    monkeypatch.chdir(folder)
    for task, place in zip(TASKS, places, strict=True):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / task).rename(folder / place)
    recipe(folder, "ties", "base", *places, str(folder / places[0]), "./base")
    experts = shown(capsys, calibrate(folder, names=names)).split("  experts: ")[1].splitlines()[0]
    assert [word.split("=")[0] for word in experts.split(", ")] == list(names)


def test_links_are_named_as_they_are_written(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    for task in TASKS:
        (folder / "store" / task).mkdir(parents=True)
        (folder / task).rename(folder / "store" / task / "checkpoint-500")
        (folder / task).symlink_to(folder / "store" / task / "checkpoint-500")
    recipe(folder, "ties", "base", *TASKS, "./base")
    assert all(f"{task}={task}" in shown(capsys, calibrate(folder)) for task in TASKS)


def test_the_base_of_a_soup_is_no_expert(folder, capsys):
    recipe(folder, "linear", str(folder / "base"), *(str(folder / m) for m in ("base", *TASKS)))
    assert "base by mergekit_config.yml" in shown(capsys, calibrate(folder))


@pytest.mark.parametrize("content", ["a: &p 1\nmodels: [*p]", "- 1", "models: 5", "models: []"])
def test_a_recipe_that_tells_nothing_is_not_needed(folder, capsys, content):
    (folder / "merged" / "mergekit_config.yml").write_text(content)
    assert main(calibrate(folder)) == 2
    assert "--expert NAME=DIR" in capsys.readouterr().err
    experts = [word for task in TASKS for word in ("--expert", f"{task}={folder / task}")]
    named = calibrate(folder, "--base", str(folder / "base"), *experts)
    assert "not read: " in shown(capsys, named)


def test_experts_whose_names_cannot_differ(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    places = ("a-b/c/final", "a/b-c/final", "b-c/final", "c/final")
    recipe(folder, "ties", "base", *places)
    assert main(calibrate(folder, "--preset", "paper")) == 2
    line = capsys.readouterr().err
    assert "mergekit_config.yml" in line and "Name the models by --base" in line
    assert all(place in line for place in places)


def test_the_base_of_a_slerp_is_an_expert(folder, capsys):
    recipe(folder, "slerp", str(folder / "one"), str(folder / "one"), str(folder / "two"))
    assert main(calibrate(folder, "--preset", "paper")) == 2
    line = capsys.readouterr().err
    assert "--base is missing" in line and "--set anchor_rho=1" in line
    experts = [word for task in TASKS for word in ("--expert", f"{task}={folder / task}")]
    base = ["--base", str(folder / "base")]
    alone = ["--preset", "paper", "--set", "anchor_rho=1"]
    for more in (alone, base, [*base, *experts], [*alone, *experts]):
        assert all(f"  {task}: " in shown(capsys, calibrate(folder, *more)) for task in TASKS)


def test_stacked_layers_are_refused_by_their_name(folder, capsys):
    recipe(folder, "passthrough", None, str(folder / "one"), str(folder / "two"))
    for more in ([], ["--base", str(folder / "base")]):
        assert main(calibrate(folder, *more)) == 2
        line = capsys.readouterr().err
        assert "mergekit's passthrough" in line and "--base" not in line


@pytest.mark.parametrize("ending", ["", "-lora"])
def test_a_base_and_its_experts_make_no_note(folder, capsys, ending):
    write_adapters(folder, AutoModelForCausalLM.from_pretrained(folder / "base"))
    named = words(folder)
    for task in TASKS:
        named[named.index(f"{task}={folder / task}")] += ending
    assert "cosine" not in shown(capsys, named)


def test_a_sibling_in_place_of_the_base(folder, capsys):
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    write(scatter(base, 99, 0.03), folder / "sibling", word_tokenizer())
    named = words(folder)
    named[named.index(str(folder / "base"))] = str(folder / "sibling")
    note = shown(capsys, named).split("the changes from ")[1]
    assert note.startswith(
        f"--base {folder / 'sibling'} to experts one and two have a cosine of 0."
    )
    assert 0.4 < float(note.split("a cosine of ")[1].split()[0]) < 0.6


def test_adapters_that_mergekit_added(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    write_adapters(folder, AutoModelForCausalLM.from_pretrained(folder / "base"))
    forms = ("base+one-lora", {"model": {"path": "base"}, "lora": {"path": "two-lora"}})
    content = {"merge_method": "linear", "models": [{"model": form} for form in forms]}
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))
    shown_lines = shown(capsys, calibrate(folder, names=("one-lora", "two-lora")))
    assert "base by mergekit_config.yml" in shown_lines and "  base: base\n" in shown_lines
    assert "one-lora (LoRA adapter), two-lora=two-lora (LoRA adapter)" in shown_lines
    content["models"][1] = {"model": "one+two-lora"}
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))
    assert main(calibrate(folder)) == 2
    assert "adds LoRA adapters to base, one" in capsys.readouterr().err


@pytest.mark.parametrize("ranges", [[(0, 1), (0, 2)], [(1, 2), (1, 2)]])
def test_slices_of_different_layers_are_refused(folder, capsys, ranges):
    sources = [
        {"model": str(folder / task), "layer_range": list(span)}
        for task, span in zip(TASKS, ranges, strict=True)
    ]
    content = {"merge_method": "linear", "slices": [{"sources": sources}]}
    (folder / "merged" / "mergekit_config.yml").write_text(json.dumps(content))
    assert main(calibrate(folder)) == 2
    assert "mergekit's linear from slices of different layers" in capsys.readouterr().err


def test_the_tokenizer_of_an_expert_where_the_merge_has_none(folder, capsys):
    for name in ("merged", "base"):
        for file in (folder / name).glob("*token*"):
            file.unlink()
    recipe(folder, "linear", None, str(folder / "one"), str(folder / "two"))
    shown(capsys, calibrate(folder))
