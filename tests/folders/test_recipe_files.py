"""`featcal calibrate recipe.yaml`, the recipe beside a result, and the same options in Python."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from made_folders import llama_folders
from safetensors.torch import load_file
from tiny_texts import TASKS

from fusion_bench_featcal.cli import main
from fusion_bench_featcal.folders import calibrate_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Models and texts, in the current folder."""
    llama_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options(**more: Any) -> dict[str, Any]:
    """Options of a short calibration, by relative paths."""
    models = {"base": "base", "expert": {task: task for task in TASKS}}
    data = {task: f"{task}.jsonl" for task in TASKS}
    settings = {"samples_per_task": 4, "ridge_lambda": "1e-1"}
    run = {"preset": "paper", "set": settings, "out": "out", "no_eval": True}
    return {**models, "data": data, **run, **more}


def weights(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "model.safetensors")


def test_a_result_has_the_recipe_that_repeats_it(folder, monkeypatch, tmp_path):
    assert calibrate_folder("merged", **options()) == Path("out")
    recipe = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert recipe["base"] == str(folder / "base") and recipe["expert"][TASKS[0]].startswith("/")
    assert "out" not in recipe and "eval_rows" not in recipe
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    assert main(["calibrate", "../out/recipe.yaml", "--out", "again"]) == 0
    first, again = weights("../out"), weights("again")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert Path("again/recipe.yaml").read_text() == Path("../out/recipe.yaml").read_text()


def test_a_merge_has_its_scale_in_the_recipe(folder, capsys):
    calibrate_folder(merge="task_arithmetic", **options())
    assert yaml.safe_load(Path("out/recipe.yaml").read_text())["merge"] == "task_arithmetic:0.3"
    assert "merge: task_arithmetic:0.3" in capsys.readouterr().out


def test_options_of_the_command_line_win_over_the_recipe(folder):
    Path("mine.yaml").write_text(yaml.safe_dump({"merged": "merged", **options(set={"seed": 1})}))
    words = ["mine.yaml", "--set", "samples_per_task=2", "--preset", "paper", "--resume"]
    assert main(["calibrate", *words, "--data", f"{TASKS[0]}={TASKS[1]}.jsonl"]) == 0
    recipe = yaml.safe_load(Path("out/recipe.yaml").read_text())
    assert recipe["set"] == {"seed": 1, "samples_per_task": 2}
    assert recipe["data"] == dict.fromkeys(TASKS, str(folder / f"{TASKS[1]}.jsonl"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bases: base", "mine.yaml: unknown key 'bases' (nearest: 'base')"),
        ("eval_rows: many", "mine.yaml: eval_rows must be an integer >= 1, got 'many'"),
        ("expert: one", "mine.yaml: expert must be a mapping, got 'one'"),
        ("preset: minus", "mine.yaml: preset must be one of plus, paper, got 'minus'"),
        ("- base", "mine.yaml is no recipe"),
        ("{merged: merged, expert: {one: one}, data: {one: x}, columns: {one: [a]}}",
         "--columns: one is ['a'], neither a column nor an expert's mapping"),
        ("base: [", "mine.yaml cannot be read"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_read(folder, capsys, text, message):
    Path("mine.yaml").write_text(text)
    assert main(["calibrate", "mine.yaml", "--out", "out"]) == 2
    assert message in capsys.readouterr().err


def test_a_recipe_that_is_not_there(folder, capsys):
    assert main(["calibrate", "nothere.yaml", "--out", "out"]) == 2
    assert "recipe nothere.yaml: there is no such file" in capsys.readouterr().err


def test_a_keyword_that_is_no_option():
    with pytest.raises(ValueError, match=r"calibrate_folder: unknown key 'bse' \(nearest: 'base'"):
        calibrate_folder("merged", bse="base")
    with pytest.raises(ValueError, match="give --out DIR"):
        calibrate_folder("merged", base="base")
