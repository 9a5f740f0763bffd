"""A hub that fails: every door says what it was and what to do, and asks again where that helps.

The client of the hub is the real one. It runs in a process of its own, online, and asks a mirror.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_mirror import Failure, Mirror, etag
from made_folders import llama_folders
from safetensors.torch import load
from tiny_images import write_class_folders, write_clip
from tiny_texts import TASKS

from fusion_bench_featcal.hub_errors import RETRIES

DOORS = ("calibrate", "run")
RESUMES = int(huggingface_hub.__version__.partition(".")[0]) == 0
"""Later clients begin an interrupted file anew."""
AGAIN = "A second run goes on where this one stopped"
CHUNK = 10 * 2**20  # bytes that the client writes at once
DRIVER = """
import contextlib, io, json, sys
import fusion_bench_featcal.algorithm
from fusion_bench.modelpool import CLIPVisionModelPool
from huggingface_hub import snapshot_download
from omegaconf import OmegaConf
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.cli import main

MERGER = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}

def calibrate(words):
    with contextlib.redirect_stderr(io.StringIO()) as screen:
        code = main(["calibrate", *words])
    lines = [line for line in screen.getvalue().splitlines() if "featcal: error" in line]
    assert len(lines) == (code != 0), screen.getvalue()
    return "".join(lines)

def run(pool):
    try:
        pool = CLIPVisionModelPool(**OmegaConf.create(pool))
        FeatCalAlgorithm(base_method=MERGER, samples_per_task=4, decode_workers=0).run(pool)
    except CalibrationError as error:
        return str(error)
    return ""

for line in sys.stdin:
    name, argument = json.loads(line)
    with contextlib.redirect_stdout(sys.stderr):
        answer = {"calibrate": calibrate, "run": run, "other": snapshot_download}[name](argument)
    print(json.dumps(answer), flush=True)
"""


class Doors:
    """The doors in a process that uses a mirror, and what they need beside the hub."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        """Make models and data, and start the process."""
        self.mirror = mirror
        self.folder = folder
        self.cache = folder / "home" / "hub"
        llama_folders(folder)
        self.clip = str(write_clip(folder / "clip"))
        images = str(write_class_folders(folder / "images"))
        load = "fusion_bench_featcal.tasks.load_images"
        self.pool = {
            "models": {"_pretrained_": self.clip, "one": self.clip},
            "processor": self.clip,
            "train_datasets": {"one": {"_target_": load, "path": images}},
        }
        waits = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        with (folder / "screen").open("w") as screen:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER],
                env=mirror.environment(folder / "home") | waits,
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=screen,
                text=True,
            )

    def ask(self, name: str, argument: Any) -> str:
        """Let the process do something; the message of the error that ended it, if one did."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([name, argument]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "screen").read_text()[-3000:]
        return json.loads(answer)

    def of_expert(self, door: str, name: str) -> str:
        """Enter a door with an expert on the hub, and without data."""
        if door == "run":
            return self.ask(door, self.pool | {"models": self.pool["models"] | {"one": name}})
        return self.ask(door, self.words(expert=name, data="no.jsonl"))

    def words(self, expert: str, data: str) -> list[str]:
        """Words of `featcal calibrate` for a single expert."""
        base = str(self.folder / "base")
        named = ["--base", base, "--expert", f"one={expert}", "--data", f"one={data}"]
        return [base, *named, "--out", str(self.folder / "never")]


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    with Mirror() as mirror:
        made = Doors(mirror, tmp_path_factory.mktemp("hub"))
        with made.process:
            yield made
            made.process.kill()


def weights(size: int = 100) -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": bytes(size)}


FAILURES: dict[Failure, list[str]] = {
    "gated": ["access is restricted. Ask for it on the hub's page and log in (hf auth login)"],
    "missing": ["the hub gives nothing of that name. Correct it, or log in if it is private"],
    "busy": ["the hub is busy (503). Wait, or log in", AGAIN],
    "limited": ["the hub is busy (429). Wait, or log in", AGAIN],
    "cut": ["the hub at http://127.0.0.1", "does not answer. Check the network", AGAIN],
    "silent": ["the hub at http://127.0.0.1", "does not answer. Check the network", AGAIN],
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_tokenizers_and_processors_are_fetched_as_models_are(door, doors):
    name = f"{door}/processor"
    doors.mirror.add(name, weights(), "gated")
    if door == "run":
        told = doors.ask(door, doors.pool | {"processor": name})
    else:
        words = doors.words(str(doors.folder / "one"), str(doors.folder / "one.jsonl"))
        told = doors.ask(door, [*words, "--tokenizer", name])
    setting = {"run": "modelpool.processor=", "calibrate": "--tokenizer "}[door]
    assert f"{setting}{name}: access is restricted" in told


@pytest.mark.parametrize(
    ("failure", "door"), [*((failure, "calibrate") for failure in FAILURES), ("gated", "run")]
)
def test_each_failure_of_a_model_is_told_with_its_remedy(failure, door, doors):
    name = f"{door}/{failure}"
    doors.mirror.add(name, weights(), failure)
    told = doors.of_expert(door, name)
    option = {"run": "modelpool.models.one=", "calibrate": "--expert one="}[door]
    assert f"{option}{name}: " in told
    for words in FAILURES[failure]:
        assert words in told
    assert told.endswith(AGAIN) == (AGAIN in FAILURES[failure])
    assert len(told) < 350
    questions = [r for r in doors.mirror.requests_of(name) if r.path == f"/api/models/{name}"]
    assert len(questions) == 1 + RETRIES * (failure in ("busy", "limited"))


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.skipif(not RESUMES, reason="the client writes to a file of another name each time")
def test_a_full_disk_is_told_with_its_path_and_room(door, doors):
    name = f"{door}/large"
    doors.mirror.add(name, weights())
    blobs = doors.cache / f"models--{door}--large" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag(weights()['model.safetensors'])}.incomplete").symlink_to("/dev/full")
    told = doors.of_expert(door, name)
    assert f"no room left in {doors.cache} (" in told and "iB free). Make room, or set HF_" in told
    assert told.endswith(AGAIN)


@pytest.mark.parametrize("failure", ["busy", "limited", "cut"])
def test_a_failure_that_passes_is_not_told(failure, doors):
    name = f"passing/{failure}"
    doors.mirror.add(name, doors.folder / "one", failure, times=RETRIES)
    assert "data 'no.jsonl' does not exist" in doors.of_expert("calibrate", name)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.skipif(not RESUMES, reason="the client begins an interrupted file anew")
def test_retries_and_a_second_run_go_on_at_the_byte(door, doors):
    name = f"{door}/broken"
    repository = doors.mirror.add(name, weights(3 * CHUNK), "cut")
    assert doors.of_expert(door, name).endswith(AGAIN)
    repository.failure = ""
    assert "broke off" not in doors.of_expert(door, name)
    gets = [r for r in doors.mirror.requests_of(name) if r.method == "GET"]
    firsts = [r.first_byte for r in gets if r.path.endswith("/model.safetensors")]
    assert firsts == [0, CHUNK, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK]


def test_models_that_were_fetched_are_not_fetched_again(doors):
    mirror, folder = doors.mirror, doors.folder
    for name in ("base", "merged", *TASKS):
        repository = mirror.add(f"llama/{name}", folder / name)
        if name == "base":
            torch.save(load(repository.files.pop("model.safetensors")), folder / "base.bin")
            repository.files["pytorch_model.bin"] = (folder / "base.bin").read_bytes()
        repository.revisions["v1"] = repository.files
    for name in ("clip", "processor"):
        repository = mirror.add(f"vision/{name}", Path(doors.clip))
        repository.revisions["v1"] = repository.files
    words = ["llama/merged", "--base", "llama/base", "--set", "samples_per_task=4", "--force"]
    for task in TASKS:
        words += ["--expert", f"{task}=llama/{task}@v1", "--data", f"{task}={folder / task}.jsonl"]
    assert doors.ask("calibrate", [*words, "--out", str(folder / "out"), "--plan"]) == ""
    screen = (folder / "screen").read_text()
    assert "to fetch: llama/merged, " in screen and "to fetch: llama/one@v1, " in screen
    assert not [*doors.cache.glob("models--llama--*/**/*.safetensors")]
    assert not (folder / "out").exists()
    models = {"_pretrained_": "vision/clip", "one": "vision/clip@v1"}
    pool = doors.pool | {"models": models, "processor": "vision/processor@v1"}
    for number in range(2):
        asked = len(mirror.requests)
        assert doors.ask("calibrate", [*words, "--out", str(folder / f"out-{number}")]) == ""
        assert doors.ask("run", pool) == ""
        gets = [request for request in mirror.requests[asked:] if request.method == "GET"]
        assert any("/resolve/" in request.path for request in gets) == (number == 0)
        for repository in mirror.repositories.values():
            repository.failure = "silent"
    versions = json.loads((folder / "out-1" / "provenance.json").read_text())["versions"]
    for name in ("llama/base", "llama/merged", *(f"llama/{task}@v1" for task in TASKS)):
        assert versions[name] == mirror.repositories[name.partition("@")[0]].commit


@pytest.mark.parametrize("failure", ["silent", "busy", "gated"])
def test_models_that_another_program_has_fetched_are_taken_if_the_hub_fails(failure, doors):
    name = f"other/{failure}"
    repository = doors.mirror.add(name, doors.folder / "one")
    doors.ask("other", name)
    repository.failure = failure
    assert "data 'no.jsonl' does not exist" in doors.of_expert("calibrate", name)


@pytest.mark.parametrize("failure", ["silent", "gated"])
def test_weights_that_one_door_has_fetched_do_for_the_other_if_the_hub_fails(failure, doors):
    name = f"kept/{failure}"
    files = {file.name: file.read_bytes() for file in Path(doors.clip).iterdir()}
    repository = doors.mirror.add(name, files | {"README.md": b"# A model"})
    doors.of_expert("calibrate", name)  # ends behind the fetch: it is no language model
    repository.failure = failure
    assert doors.of_expert("run", name) == ""


def test_files_that_a_model_in_the_cache_lacks_are_fetched(doors):
    doors.mirror.add("half/model", weights())
    doors.of_expert("calibrate", "half/model")
    (weight,) = doors.cache.glob("models--half--model/snapshots/*/model.safetensors")
    weight.unlink()
    doors.of_expert("calibrate", "half/model")
    assert weight.is_file()


SLOW = ("busy", "silent")
"""Failures after which the client asks for half a minute by itself."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "failure",
    ["gated", "missing", "limited", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)],
)
def test_each_failure_of_a_data_set_is_told_with_its_remedy(failure, door, doors):
    name = f"{door}/{failure}-data"
    doors.mirror.add(f"datasets/{name}", {"train.jsonl": b'{"text": "a"}'}, failure)
    if door == "run":
        data = {"_target_": "datasets.load_dataset", "path": name, "split": "train"}
        told = doors.ask("run", doors.pool | {"train_datasets": {"one": data}})
    else:
        told = doors.ask("calibrate", doors.words(str(doors.folder / "one"), f"{name}:train"))
    setting = {"run": f"modelpool.train_datasets.one={name!r}: ", "calibrate": f"data '{name}'"}
    assert setting[door] in told
    for words in FAILURES[failure]:
        assert words in told
