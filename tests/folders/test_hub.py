"""Models of the hub: only needed files are fetched, once, and failures have remedies.

The client of the hub is the real one. It is connected to a mirror.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_mirror import Failure, Mirror
from reports import featcal
from safetensors.torch import load_file
from tiny_texts import TASKS

from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.models import hub

AGAIN = "run the command again"
MODEL = {
    "LICENSE": b"free",
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"weights" * 100,
}


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    with Mirror() as served:
        served.connect(monkeypatch, tmp_path / "cache")
        yield served


def fetched(name: str) -> dict[str, bytes]:
    """Content of the files in the folder of a fetched model."""
    folder = hub.fetch(name, f"--base {name}")
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


FAILURES: dict[Failure, str] = {
    "missing": "nothing of that name on the hub. Correct it, or log in (hf auth login) if it is",
    "gated": "access is restricted. Ask for it on the hub's page and log in",
    "limited": f"the hub is busy (429). Wait, or log in (hf auth login), and {AGAIN}",
    "cut": f"does not answer. Check the network and {AGAIN}",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_has_a_remedy_and_the_same_command_goes_on(failure, mirror, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    repository = mirror.add("some/model", MODEL, failure)
    with pytest.raises(CalibrationError) as caught:
        fetched("some/model")
    assert str(caught.value).startswith("--base some/model: ")
    assert FAILURES[failure] in str(caught.value)
    assert str(caught.value).endswith("The download resumes") == (failure == "cut")
    repository.failure = ""
    assert fetched("some/model") == MODEL


@pytest.mark.parametrize("files", [MODEL, {"config.json": b"{}", "model.safetensors": b"weights"}])
def test_bytes_that_are_not_the_hubs_are_removed_and_fetched_again(files, mirror):
    last = max(files)  # weights have a sha256, small files a hash of git
    repository = mirror.add("some/model", files, "altered")
    with pytest.raises(
        CalibrationError, match=rf"^--base some/model: the downloaded {last} differs from"
    ):
        fetched("some/model")
    repository.failure = ""
    assert fetched("some/model") == files


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_a_request_that_fails_once_is_repeated(status, mirror, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    mirror.add("some/model", MODEL).hiccup = status
    assert fetched("some/model") == MODEL
    requests = [(request.method, request.path) for request in mirror.requests]
    assert all(requests.count(request) > 1 for request in requests) and waits


def test_a_folder_here_with_nearly_the_name_is_named(mirror, tmp_path, monkeypatch):
    (tmp_path / "llama-base").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CalibrationError, match=r"^--base lama-base \(nearest: 'llama-base'\): the"):
        fetched("lama-base")


def test_a_full_disk_is_noticed_before_and_the_cache_serves_if_the_hub_fails(mirror, monkeypatch):
    repository = mirror.add("some/model", MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(hub, "free_space", lambda folder: 10)
        with pytest.raises(CalibrationError, match=r"no room on the disk .* set HF_HOME to a"):
            fetched("some/model")
    assert not mirror.files_sent("some/model")
    assert fetched("some/model@v1") == MODEL
    assert hub.commits() == dict.fromkeys(("some/model", "some/model@v1"), repository.commit)
    repository.failure = "limited"
    hub._MODELS.clear()  # as another process
    assert fetched("some/model@v1") == MODEL


UNUSED = ["README.md", "tf_model.h5", "original/consolidated.pth", "training_args.bin",
          "trainer_state.json", "onnx/model.safetensors"]  # fmt: skip


@pytest.mark.parametrize(
    ("needed", "others"),
    [
        (["model-1-of-1.safetensors", "model.safetensors.index.json"], ["pytorch_model.bin"]),
        (["pytorch_model-1-of-1.bin", "pytorch_model.bin.index.json"], []),
        (["adapter_config.json", "adapter_model.safetensors"], ["adapter_model.bin"]),
        (["model.safetensors", "1_Pooling/config.json", "2_Dense/model.safetensors"],
         ["0_Transformer/model.safetensors"]),
    ],
)  # fmt: skip
def test_only_files_that_are_read_are_fetched(needed: list[str], others: list[str]):
    files = hub.needed_files([*UNUSED, *others, *needed, "tokenizer.json"])
    assert sorted(files) == sorted([*needed, "tokenizer.json"])
    configs = hub.needed_files([*UNUSED, *others, *needed], weights=False)
    assert configs == sorted(n for n in needed if n.endswith(".json") and "/" not in n)
    licences = ["LICENSE", "NOTICE.md"]
    assert hub.needed_files([*needed, *licences]) == hub.needed_files(needed)
    assert {*hub.needed_files([*needed, *licences], notices=True)} == {*needed, *licences}


@pytest.mark.slow
@pytest.mark.ci
def test_models_of_a_run_are_fetched_at_once_and_the_base_may_be_a_bin_file(mirror, folder):
    names = [f"llama/{name}" for name in ("base", "merged", *TASKS)]
    for name in names:
        mirror.add(name, folder / name.partition("/")[2])
    base = mirror.repositories["llama/base"].files
    del base["model.safetensors"]
    torch.save(load_file(folder / "base" / "model.safetensors"), folder / "base.bin")
    base["pytorch_model.bin"] = (folder / "base.bin").read_bytes()

    def run(out: str, *more: str, merged: str = "llama/merged", **models: str) -> Any:
        options = ["--out", str(folder / out), "--set", "samples_per_task=4", "--no-eval"]
        options += ["--base", models.get("base", "llama/base"), *more]
        for task in TASKS:
            options += ["--expert", f"{task}={models.get(task, f'llama/{task}@v1')}"]
            options += ["--data", f"{task}={folder / task}.jsonl"]
        done = featcal("calibrate", merged, *options)
        assert done.code == 0, done.err
        return done

    planned = run("out", "--plan").out
    assert "to fetch: llama/merged, " in planned and "to fetch: llama/one@v1, " in planned
    assert not any(mirror.files_sent(name) for name in names)
    assert run("out").err.count("downloading 4 models: ") == 1
    for name in names:
        mirror.repositories[name].failure = "limited"
    assert "downloading" not in run("again").err
    assert all(len(sent) == 1 for name in names for sent in mirror.files_sent(name).values())
    versions = json.loads((folder / "out" / "featcal" / "run.json").read_text())["versions"]
    assert versions["llama/one@v1"] == mirror.repositories["llama/one"].commit
    run("local", merged=str(folder / "merged"), base=str(folder / "base"))
    results = [(folder / o / "model.safetensors").read_bytes() for o in ("out", "again", "local")]
    assert results[0] == results[1] == results[2]
