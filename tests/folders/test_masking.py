"""Secrets of a command appear in no file that it writes, and the rest of its words does."""

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cli_runs import screen
from hydra.types import RunMode
from made_folders import FEW
from reports import featcal, make_run
from tiny_texts import TASKS

from fusion_bench_featcal.errors.block import error_block
from fusion_bench_featcal.errors.masking import masked, masked_values
from fusion_bench_featcal.fusionbench.console import mask_hydra_files
from fusion_bench_featcal.models.saving import CardFacts, card_text
from fusion_bench_featcal.results import Note, read_run, write_run
from fusion_bench_featcal.suites import image

KEY = "PLANTED"
TOKEN = f"hf_{KEY}abcdefghijklmnopqrstu"
# Text -> without secrets.
TEXTS = {
    f"token=hf_{KEY}": "token=***",
    f"api_key='{KEY} {KEY}'": "api_key=***",
    f"AWS_SECRET_ACCESS_KEY: '{KEY}, {KEY}'": "AWS_SECRET_ACCESS_KEY: ***",
    f"https://me:{KEY}@host/a?x=1": "https://***@host/a?x=1",
    f"https://me:{KEY}@{KEY}@host/org/a@v1": "https://***@host/org/a@v1",
    f"s3://{KEY}:{KEY}@bucket/a": "s3://***@bucket/a",
    f"s3://{KEY}:{KEY}/{KEY}@bucket": "s3://***@bucket",
    f"https://h/a?X-Amz-Credential={KEY}%2Fx&X-Amz-Signature={KEY}&sig={KEY}&n=1":
        "https://h/a?X-Amz-Credential=***&X-Amz-Signature=***&sig=***&n=1",
    f"Authorization: Bearer {KEY}": "Authorization: ***",
    f"{{'token': '{KEY} {KEY}', 'n': 1}}": "{'token': ***, 'n': 1}",
    f'{{"a": "{{\\"token\\": \\"{KEY}\\"}}"}}': '{"a": "{\\"token\\": ***}"}',
    f"storage_options={{key: {KEY}, secret: {KEY}}}": "storage_options=***",
    f"cannot open {TOKEN}.": "cannot open ***.",
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_secrets_of_a_text_are_masked(text: str) -> None:
    assert KEY not in str(masked_values([text]))
    assert masked(text) == TEXTS[text]
    assert KEY not in error_block(ValueError(text))


@pytest.mark.parametrize(
    "text",
    [
        "samples_per_task=8 generated_tokens=64 --tokenizer=DIR eos_token=</s>",
        "org/model@v1 hf://datasets/org/data@v1/a.jsonl http://localhost:8000/org/model@v1",
        "hf_checkpoints/llama author=me sigma=1 config=a",
        "no token: log in (hf auth login) or data/token.jsonl: line 3: no text",
        "a token: {} boi_token: 4 newline_token=n",
    ],
)
def test_other_texts_are_unchanged(text: str) -> None:
    assert masked(text) == text and masked_values([*text.split()]) == text.split()


def test_tasks_may_be_called_like_secrets() -> None:
    values = {"data": {"signature": "./one.jsonl"}, "task_weights": {"token": 2.0}}
    assert masked_values(values) == values
    assert masked_values([f"signature={__file__}"]) == [f"signature={__file__}"]


def test_values_with_the_name_of_a_secret_are_masked() -> None:
    values = {"storage_options": {"key": KEY, "n": 1}, "use_auth_token": True, "token": None}
    values |= {"hub": {"password": [KEY, 12345]}, "words": [f"+a.b.password={KEY} {KEY}", "n=1"]}
    expected = {"storage_options": {"key": "***", "n": "***"}, "use_auth_token": True}
    expected |= {"token": None, "hub": {"password": ["***", "***"]}}
    assert masked_values(values) == expected | {"words": ["+a.b.password=***", "n=1"]}


def planted(folder: Path) -> list[str]:
    """Files that contain a planted secret."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return [str(file.relative_to(folder)) for file in files if KEY.encode() in file.read_bytes()]


def test_a_card_and_a_run_contain_no_secrets_and_no_full_paths(tmp_path, monkeypatch) -> None:
    words = ["calibrate", "/home/me/models/merged", f"--data=one=https://me:{KEY}@host/a.jsonl",
             f"s3://{KEY}:{KEY}@bucket", f"api_key={KEY}", f"token={TOKEN}"]  # fmt: skip
    words += [f"x?X-Amz-Signature={KEY}", f"+a={{path: /home/me/b/, token: {KEY}}}"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/featcal", *words])
    locations = {"one": "/home/me/one", "two": f"https://me:{KEY}@host/two", "three": "org/3@v1"}
    merger: Any = {"path": f"s3://{KEY}:{KEY}@bucket", "storage_options": {"key": KEY}}
    run = make_run()
    run.row("featcal").settings |= {"token": KEY, "data": {"one": f"{locations['two']}"}}
    run.row("featcal").conditions |= {"api_key": KEY}
    run.note(Note("verdict", f"read {locations['two']}"))
    facts = CardFacts("featcal", merger, run.row("featcal").settings, {})
    (tmp_path / "README.md").write_text(card_text(facts, "org/base", locations, run))
    write_run(tmp_path, run)
    assert planted(tmp_path) == []
    card = (tmp_path / "README.md").read_text()
    assert "/home" not in card and "featcal calibrate merged '--data=one=https://***@host" in card
    assert "- one: `one`" in card and "- two: `https://***@host/two`" in card
    assert read_run(tmp_path).row("featcal").settings["token"] == "***"


def test_a_calibration_leaves_no_secret_in_its_folder(folder, monkeypatch, capsys) -> None:
    """The folder of the data is `https:`, so that a location with a password is a file."""
    monkeypatch.chdir(folder)
    address = f"https://me:{KEY}@host?X-Amz-Signature={KEY}&token={TOKEN}"
    os.makedirs(address)
    words = ["merged", "--base", "base", "--out", "deep/out", "--no-eval", *FEW]
    for task in TASKS:
        shutil.move(f"{task}.jsonl", address)
        words += ["--expert", f"{task}={task}", "--data", f"{task}={address}/{task}.jsonl"]
    monkeypatch.setattr(sys, "argv", ["featcal", "calibrate", *words])
    done = featcal("calibrate", *words)
    assert done.code == 0, done.err
    assert KEY not in done.out + done.err
    assert planted(folder / "deep") == []
    recipe = yaml.safe_load(Path("deep/out/recipe.yaml").read_text())
    assert recipe["merged"] == "../../merged" and recipe["expert"]["one"] == "../../one"
    again = featcal("calibrate", *words, "--resume")
    assert "deep/out is complete: this command saved it before" in again.out
    error = featcal("calibrate", *words, "--data", f"one={address}/{KEY}.jsonl", "--out", "b").err
    assert KEY not in error.replace(f"/{KEY}.jsonl", "")


def test_files_of_hydra_are_masked(tmp_path: Path) -> None:
    hydra: Any = SimpleNamespace(
        sweep=SimpleNamespace(dir=str(tmp_path)), mode=RunMode.MULTIRUN, output_subdir="",
        runtime=SimpleNamespace(output_dir=str(tmp_path)),
    )  # fmt: skip
    config = {"pool": {"token": KEY, "n": "${a}"}, "list": [f"+a.password={KEY} {KEY}"]}
    for name in ("config", "hydra", "multirun"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "overrides.yaml").write_text(yaml.safe_dump([f"+a.token={KEY}", "n=1"]))
    mask_hydra_files(hydra)
    assert planted(tmp_path) == []
    expected = {"pool": {"token": "***", "n": "${a}"}, "list": ["+a.password=***"]}
    assert yaml.safe_load((tmp_path / "config.yaml").read_text()) == expected
    assert yaml.safe_load((tmp_path / "overrides.yaml").read_text()) == ["+a.token=***", "n=1"]


@pytest.mark.slow
def test_a_run_of_fusion_bench_leaves_no_secret(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fusion_bench_featcal.suites.image import load_split\n"
        "def load(task, split, **more): return load_split(task=task, split=split)\n"
    )
    korean = image.path("mini_korean")
    loader = "transformers.CLIPVisionModel.from_pretrained"
    model = f"{{_target_: {loader}, pretrained_model_name_or_path: '{korean}', token: {TOKEN}}}"
    data = "modelpool.train_datasets.mini_korean"
    words = [
        "method=featcal", "modelpool=clip-vit-mini_alphabets2", "path.log_dir=log",
        "merged_model_save_path=saved", "method.samples_per_task=4", "method.presets={}",
        f"modelpool.models.mini_korean={model}", f"{data}._target_=mine.load",
        f"+{data}.storage_options={{key: {KEY}, secret: {KEY}}}", f"+{data}.api_key={KEY}",
        f"+{data}.url='https://me:{KEY}@host/a?X-Amz-Signature={KEY}'",
        f"+{data}.s3=s3://{KEY}:{KEY}@bucket",
    ]  # fmt: skip
    done = screen(words, tmp_path, fresh=True)
    assert done.code == 0, done.text[-6000:]
    assert planted(tmp_path) == [] and (tmp_path / "log" / "config_resolved.yaml").is_file()
    done = screen([*words, f"method.modules=[api_key={KEY}]", "path.log_dir=no"], tmp_path)
    assert done.code == 1 and planted(tmp_path) == []
