"""`featcal calibrate`: columns and splits of data, `--plan`, `--shard-size`, and the screen."""

from pathlib import Path
from typing import Any

import datasets
import pytest
from made_folders import ROWS, image_classifier_folders, llama_folders, write_rows
from test_calibrate_command import report_of, words
from tiny_texts import TASKS, sentences
from transformers import AutoModelForCausalLM

from fusion_bench_featcal.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    llama_folders(tmp_path)
    return tmp_path


def test_columns_of_all_tasks_and_of_one(folder):
    first, second = (sentences(task, ROWS) for task in TASKS)
    rows = [{"q": row["prompt"], "a": row["target"], "prompt": "id"} for row in first]
    write_rows(folder / f"{TASKS[0]}.jsonl", rows)
    rows = [{"ask": row["prompt"], "a": row["target"]} for row in second]
    write_rows(folder / f"{TASKS[1]}.jsonl", rows)
    columns = ["--columns", "prompt=q,target=a", "--columns", f"{TASKS[1]}:prompt=ask"]
    assert main(words(folder, "--preset", "paper", *columns)) == 0
    named = report_of(folder)
    assert "one.jsonl (prompt=q, target=a); evaluated on" in named.notes[0].text
    assert "two.jsonl (prompt=ask, target=a); evaluated on" in named.notes[1].text
    (folder / "out").rename(folder / "named")
    llama_folders(folder)
    assert main(words(folder, "--preset", "paper")) == 0
    assert report_of(folder).loss == named.loss


def test_splits_of_a_saved_data_set(folder, capsys):
    rows: Any = {n: datasets.Dataset.from_list(sentences("one", ROWS)) for n in ("one", "fit")}
    datasets.DatasetDict(rows).save_to_disk(folder / "saved")
    more = ["--preset", "paper", "--no-eval"]
    named = [word.replace("one.jsonl", "saved:fit") for word in words(folder, *more)]
    assert main(named) == 0
    (folder / "out").rename(folder / "first")
    for split, message in ((":tests", "has no split 'tests'"), ("", "has no split 'train'")):
        assert main([word.replace("one.jsonl", f"saved{split}") for word in words(folder)]) == 2
        assert message in capsys.readouterr().err


def test_columns_of_image_tables(tmp_path, capsys):
    image_classifier_folders(tmp_path)
    pictures = sorted((tmp_path / "one-images").rglob("*.png"))
    rows = [{"picture": str(file), "shape": file.parent.name} for file in pictures]
    write_rows(tmp_path / "one.jsonl", rows)
    named = words(tmp_path, "--preset", "paper", ending="-images")
    named = [word.replace("one-images", "one.jsonl") for word in named]
    assert main(named) == 2
    assert "no image_column 'image'" in capsys.readouterr().err
    assert main([*named, "--columns", "one:image=picture,label=shape"]) == 0
    assert report_of(tmp_path).test_sets["one"]["items"] == len(pictures) // 5


def test_a_plan_does_nothing(folder, capsys):
    before = sorted(folder.iterdir())
    assert main(words(folder, "--plan")) == 0
    shown = capsys.readouterr().out
    assert sorted(folder.iterdir()) == before
    for part in ("one: 12 samples of ", "read from experts", "nothing was run", "are free for"):
        assert part in shown
    assert "saved: " not in shown


def test_shards_of_a_chosen_size(folder, capsys):
    assert main(words(folder, "--shard-size", "2 bytes")) == 2
    assert "or a size such as 500MB or 2GB, got" in capsys.readouterr().err
    assert main(words(folder, "--preset", "paper", "--no-eval", "--shard-size", "3KB")) == 0
    assert len(list((folder / "out").glob("model-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(folder / "out").config.model_type == "llama"
