"""End tokens of the saved model: those of all models, as in the evaluation."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_folders import FEW, change_json, words
from reports import featcal
from transformers import AutoModelForCausalLM

FILE = "generation_config.json"
QUICK = ("--no-eval", *FEW)


def saved(folder: Path) -> tuple[dict[str, Any], str]:
    """Content of the calibrated model's file, and what the run printed."""
    done = featcal(*words(folder, *QUICK))
    assert done.code == 0, done.err
    return json.loads((folder / "out" / FILE).read_text()), done.out


@pytest.mark.parametrize("is_missing", [False, True])
def test_the_saved_model_stops_at_the_ends_of_all_models(folder: Path, is_missing: bool):
    change_json(folder / "two" / FILE, {"eos_token_id": [1, 5]})
    change_json(folder / "one" / "config.json", {"eos_token_id": 7})
    change_json(folder / "merged" / FILE, {"temperature": 0.5, "do_sample": True})
    if is_missing:
        (folder / "merged" / FILE).unlink()
    content, printed = saved(folder)
    assert content["eos_token_id"] == [1, 5, 7] and content["bos_token_id"] == 2
    assert content.get("temperature") == (None if is_missing else 0.5)
    assert "_from_model_config" not in content
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert loaded.generation_config.eos_token_id == [1, 5, 7]
    sentence = "the saved model stops at the end tokens of all models (1, 5, 7), as in this run"
    assert f"{sentence}; the merged model {folder / 'merged'} declares 1\n" in printed


def test_a_file_that_has_all_ends_is_left_as_it_is(folder: Path):
    change_json(folder / "merged" / FILE, {"eos_token_id": [5, 1], "zeal": 1})
    change_json(folder / "two" / FILE, {"eos_token_id": 5})
    content, printed = saved(folder)
    assert content == json.loads((folder / "merged" / FILE).read_text())
    assert "end tokens" not in printed


def test_models_without_the_file_stay_without_it(folder: Path):
    for name in ("base", "merged", "one", "two"):
        (folder / name / FILE).unlink()
    done = featcal(*words(folder, *QUICK))
    assert done.code == 0 and not (folder / "out" / FILE).exists(), done.err
