"""Secrets of a command appear in no file that it writes, and the rest of its words does."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_runs import screen
from configs import CONFIG
from hydra.types import RunMode
from made_folders import FEW
from omegaconf import OmegaConf
from reports import featcal, make_run
from tiny_texts import TASKS

from fusion_bench_featcal.errors.masking import hide, masked, public
from fusion_bench_featcal.fusionbench.console import hide_private_texts
from fusion_bench_featcal.models.cards import card_text
from fusion_bench_featcal.results import Note, accuracy_frame, read_run, write_run
from fusion_bench_featcal.results.run import Facts
from fusion_bench_featcal.suites import image

KEY = "PLANTED"
TOKENS = (f"hf_{KEY}abcdefghijklmnop", f"sk-proj-{KEY}_a-b", f"xoxb-1-{KEY}", f"AIza{KEY}", KEY)
ADDRESSES = {
    f"https://me:{KEY}@host/a?x=1": "https://***@host/a?***",
    f"https://me:{KEY}@{KEY}@host/org/a@v1": "https://***@host/org/a@v1",
    f"s3://{KEY}:{KEY}@bucket/a": "s3://***@bucket/a",
    f"s3://{KEY}:{KEY}/{KEY}@bucket": "s3://***@bucket",
    f"https://h/a?X-Amz-Credential={KEY}%2Fx&sig={KEY}&n=1 is": "https://h/a?*** is",
    f"('https://h/a?key={KEY}', 'https://h#code={KEY}')": "('https://h/a?***', 'https://h#***')",
}


@pytest.fixture(autouse=True)
def shown() -> Iterator[None]:
    """No text is hidden after a test."""
    yield
    hide({})


@pytest.mark.parametrize("text", ADDRESSES)
def test_users_and_queries_of_addresses_are_not_written(text: str) -> None:
    assert masked(text) == ADDRESSES[text]
    assert KEY not in featcal("report", text).err


@pytest.mark.parametrize("text", [
    "samples_per_task=8 generated_tokens=64 --tokenizer=DIR eos_token=</s> author=me sigma=1",
    "org/model@v1 hf://datasets/org/data@v1/a.jsonl http://localhost:8000/org/model@v1",
    "no token: log in (hf auth login) or data/token.jsonl:train: line 3: no text",
])  # fmt: skip
def test_other_texts_are_unchanged(text: str) -> None:
    assert masked(text) == text


@pytest.mark.parametrize("token", TOKENS)
@pytest.mark.parametrize("name", ["token", "webhook", "q", "storage_options"])
def test_texts_under_unknown_names_are_written_nowhere(name: str, token: str) -> None:
    call = {"_target_": "mine.load", "path": "org/data", "n": 8, "on": True, "of": None}
    private = {name: token, "more": [token, {"key": f"a {token}"}]}
    pool: Any = {"tasks": [name], "models": {name: "org/model"}, "test_datasets": {name: call}}
    assert public(pool) == pool
    masked_call = call | {name: "***", "more": ["***", {"key": "***"}]}
    pool["test_datasets"] = {name: call | private}
    assert public(pool)["test_datasets"] == {name: masked_call}
    hide(pool)
    assert masked(f"cannot open {token}: {private}, org/data").count(KEY) == 0
    hide(pool | {"train_datasets": {"cifar10": {"key": "cifar10", "mode": "training"}}})
    text = "training on cifar10, org/data and org/model"
    assert masked(text) == text


def test_settings_and_known_names_of_pools_are_written() -> None:
    files = [file for part in ("modelpool", "taskpool") for file in (CONFIG / part).rglob("*.yaml")]
    for file in files:
        pool = yaml.safe_load(file.read_text())
        content = {key: value for key, value in pool.items() if key not in ("defaults", "_usage_")}
        assert public(content) == content, file


def planted(folder: Path) -> list[str]:
    """Files that contain a planted secret."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return [str(file.relative_to(folder)) for file in files if KEY.encode() in file.read_bytes()]


def test_a_card_and_a_run_contain_no_secrets_and_no_full_paths(tmp_path, monkeypatch) -> None:
    words = ["method=featcal", "modelpool=mine", "method.base_method.path=/home/me/models/merged",
             f"modelpool.models.one.token={KEY}", f"api_key={KEY}=", KEY, "-m"]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fusion_bench", *words])
    locations = {"one": "/home/me/one", "two": f"https://me:{KEY}@host/two", "three": "org/3@v1"}
    merger: Any = {"path": f"s3://{KEY}:{KEY}@bucket"}
    run = make_run()
    run.row("featcal").settings |= {"data": {"one": f"{locations['two']}"}}
    run.row("featcal").conditions |= {"path": f"https://h/a?code={KEY}"}
    run.note(Note("warning", f"read {locations['two']}"))
    facts, frame = Facts(settings=run.row("featcal").settings), accuracy_frame(run)
    text = card_text("featcal", facts, "org/base", locations, frame, merger=merger)
    (tmp_path / "README.md").write_text(text)
    write_run(tmp_path, run)
    assert planted(tmp_path) == []
    card = (tmp_path / "README.md").read_text()
    made = "fusion_bench method=featcal modelpool=mine method.base_method.path=merged"
    assert f"{made} 'modelpool.models.one.token=***' 'api_key=***' '***' -m" in card
    assert "/home" not in card
    assert "- one: `one`" in card and "- two: `https://***@host/two`" in card
    assert read_run(tmp_path).row("featcal").conditions["path"] == "https://h/a?***"


def test_a_calibration_leaves_no_secret_in_its_folder(folder, monkeypatch, capsys) -> None:
    """The folder of the data is `https:`, so that a location with a password is a file."""
    monkeypatch.chdir(folder)
    address = f"https://me:{KEY}@host?X-Amz-Signature={KEY}&code={KEY}"
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
    card = Path("deep/out/README.md").read_text()
    assert "featcal calibrate --config recipe.yaml --out DIR" in card
    again = featcal("calibrate", *words, "--resume")
    assert "deep/out is complete: this command saved it before" in again.out
    error = featcal("calibrate", *words, "--data", f"one={address}/{KEY}.jsonl", "--out", "b").err
    assert KEY not in error.replace(f"/{KEY}.jsonl", "")


def test_files_of_hydra_are_masked(tmp_path: Path) -> None:
    hydra: Any = {
        "sweep": {"dir": str(tmp_path)}, "mode": RunMode.MULTIRUN, "output_subdir": "",
        "runtime": {"output_dir": str(tmp_path)},
    }  # fmt: skip
    for name in ("config", "hydra", "multirun", "overrides"):
        (tmp_path / f"{name}.yaml").write_text(f"token: ${{name}}-{KEY}")
    pool = {"models": {"a": {"key": f"${{name}}-{KEY}"}}}
    hide_private_texts(OmegaConf.create({"hydra": hydra, "modelpool": pool, "name": "PRE"}))
    texts = {file.read_text() for file in tmp_path.iterdir()}
    assert texts == {"token: ***"} and len([*tmp_path.iterdir()]) == 4
    assert masked(f"no PRE-{KEY}") == "no ***"


@pytest.mark.slow
def test_a_run_of_fusion_bench_leaves_no_secret(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from fusion_bench_featcal.suites.image import load_split\n"
        "def load(task, split, **more): return load_split(task=task, split=split)\n"
    )
    korean = image.path("mini_korean")
    loader = "transformers.CLIPVisionModel.from_pretrained"
    model = f"{{_target_: {loader}, pretrained_model_name_or_path: '{korean}', token: {TOKENS[0]}}}"
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
