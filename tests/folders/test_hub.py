"""Models and data of the hub: which files are fetched, once, and a remedy for each failure.

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
from hub_mirror import Failure, Mirror, Repository, etag
from made_folders import llama_folders
from safetensors.torch import load, load_file
from tiny_images import write_class_folders, write_clip
from tiny_texts import TASKS
from transformers import T5Config, T5ForConditionalGeneration

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.hub_errors import RETRIES
from fusion_bench_featcal.hub_files import needed_files

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
from fusion_bench_featcal import CalibrationError, hub_files
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.cli import main

MERGER = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
free_space = hub_files.free_space

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

def fetch(options):
    locations, weights, free = options
    hub_files.free_space = free_space if free is None else lambda folder: free
    with contextlib.redirect_stderr(io.StringIO()) as screen:
        try:
            folders = hub_files.fetch_all(locations, weights=weights)
            used = hub_files.commits()
            answer = [[str(folders[key]), used.get(name)] for key, name in locations.items()]
        except CalibrationError as error:
            answer = str(error)
    hub_files.free_space = free_space
    return answer, screen.getvalue()

DOORS = {"calibrate": calibrate, "run": run, "fetch": fetch, "other": snapshot_download}
for line in sys.stdin:
    name, argument = json.loads(line)
    with contextlib.redirect_stdout(sys.stderr):
        answer = DOORS[name](argument)
    print(json.dumps(answer), flush=True)
"""


class Hub:
    """A process that uses a mirror, with a cache of its own, and local models and data."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        """Make models and data, and start the process."""
        self.mirror, self.folder, self.cache = mirror, folder, folder / "home" / "hub"
        llama_folders(folder)
        self.clip = str(write_clip(folder / "clip"))
        images = str(write_class_folders(folder / "images"))
        data = {"_target_": "fusion_bench_featcal.tasks.load_images", "path": images}
        models = {"_pretrained_": self.clip, "one": self.clip}
        self.pool = {"models": models, "processor": self.clip, "train_datasets": {"one": data}}
        waits = {"HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2"}
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

    def ask(self, door: str, argument: Any) -> Any:
        """Enter a door, and return its answer: the message of the error that ended it, if any."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([door, argument]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "screen").read_text()[-3000:]
        return json.loads(answer)

    def fetch(self, *names: str, weights: bool = True, free: int | None = None) -> Any:
        """Fetch models; return folders and commits, or the error's message, and the screen."""
        locations = {f"--expert x{number}={name}": name for number, name in enumerate(names)}
        return self.ask("fetch", [locations, weights, free])

    def expert(self, door: str, name: str) -> str:
        """Enter a door with an expert on the hub, and without data."""
        if door == "run":
            return self.ask(door, self.pool | {"models": self.pool["models"] | {"one": name}})
        return self.ask(door, self.words(expert=name, data="no.jsonl"))

    def words(self, expert: str, data: str) -> list[str]:
        """Arguments of `featcal calibrate` for a single expert."""
        base = str(self.folder / "base")
        named = ["--base", base, "--expert", f"one={expert}", "--data", f"one={data}"]
        return [base, *named, "--out", str(self.folder / "never")]

    def files_of(self, name: str) -> list[str]:
        """Files that were downloaded of a model."""
        gets = [r.path for r in self.mirror.requests_of(name) if r.method == "GET"]
        return sorted(path.rpartition("/")[2] for path in gets if "/resolve/" in path)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Mirror() as mirror:
        opened = Hub(mirror, tmp_path_factory.mktemp("hub"))
        with opened.process:
            yield opened
            opened.process.kill()


# --- failures ---

BUSY = ["Wait, or log in", AGAIN]
AWAY = ["the hub at http://127.0.0.1", "does not answer. Check the network", AGAIN]
FAILURES: dict[Failure, list[str]] = {
    "gated": ["access is restricted. Ask for it on the hub's page and log in (hf auth login)"],
    "missing": ["the hub gives nothing of that name. Correct it, or log in if it is private"],
    "busy": ["the hub is busy (503)", *BUSY],
    "limited": ["the hub is busy (429)", *BUSY],
    "cut": AWAY,
    "silent": AWAY,
}
SLOW = pytest.mark.slow  # the client asks for half a minute by itself
SETTINGS = {
    "model": {"run": "modelpool.models.one={}: ", "calibrate": "--expert one={}: "},
    "processor": {"run": "modelpool.processor={}: ", "calibrate": "--tokenizer {}: "},
    "data": {"run": "modelpool.train_datasets.one='{}': ", "calibrate": "data '{}'"},
}


@pytest.mark.parametrize(
    ("failure", "door", "part"),
    [
        *[(failure, "calibrate", "model") for failure in FAILURES],
        ("gated", "run", "model"),
        *[("gated", door, "processor") for door in DOORS],
        *[(failure, door, "data") for failure in ("gated", "missing", "limited") for door in DOORS],
        *[pytest.param(f, d, "data", marks=SLOW) for f in ("busy", "silent") for d in DOORS],
    ],
)
def test_each_failure_has_its_setting_and_remedy(failure, door, part, hub):
    name, one = f"{door}-{part}/{failure}", str(hub.folder / "one")
    files = {"train.jsonl": b'{"text": "a"}'} if part == "data" else weights()
    hub.mirror.add(f"datasets/{name}" if part == "data" else name, files, failure)
    load = {"_target_": "datasets.load_dataset", "path": name, "split": "train"}
    if part == "model":
        message = hub.expert(door, name)
    elif door == "run":
        other = {"processor": {"processor": name}, "data": {"train_datasets": {"one": load}}}
        message = hub.ask(door, hub.pool | other[part])
    elif part == "data":
        message = hub.ask(door, hub.words(one, f"{name}:train"))
    else:
        arguments = hub.words(one, f"{hub.folder}/one.jsonl")
        message = hub.ask(door, [*arguments, "--tokenizer", name])
    for words in (SETTINGS[part][door].format(name), *FAILURES[failure]):
        assert words in message
    if part == "model":
        assert message.endswith(AGAIN) == (AGAIN in FAILURES[failure]) and len(message) < 350
        asked = [r for r in hub.mirror.requests_of(name) if r.path == f"/api/models/{name}"]
        assert len(asked) == 1 + RETRIES * (failure in ("busy", "limited"))


def weights(size: int = 100) -> dict[str, bytes]:
    return {"config.json": b"{}", "model.safetensors": bytes(size)}


@pytest.mark.parametrize("failure", ["busy", "limited", "cut"])
def test_a_failure_that_passes_is_no_error(failure, hub):
    name = f"passing/{failure}"
    hub.mirror.add(name, hub.folder / "one", failure, times=RETRIES)
    assert "data 'no.jsonl' does not exist" in hub.expert("calibrate", name)


@pytest.mark.skipif(not RESUMES, reason="the client writes to a file of another name each time")
def test_a_full_disk_has_its_path_and_room(hub):
    hub.mirror.add("disk/full", weights())
    blobs = hub.cache / "models--disk--full" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag(weights()['model.safetensors'])}.incomplete").symlink_to("/dev/full")
    message = hub.expert("calibrate", "disk/full")
    assert f"no room left in {hub.cache} (" in message and message.endswith(AGAIN)
    assert "iB free). Make room, or set HF_" in message


@pytest.mark.skipif(not RESUMES, reason="the client begins an interrupted file anew")
def test_retries_and_a_second_run_go_on_at_the_byte(hub):
    repository = hub.mirror.add("broken/off", weights(3 * CHUNK), "cut")
    assert hub.expert("calibrate", "broken/off").endswith(AGAIN)
    repository.failure = ""
    assert "broke off" not in hub.expert("calibrate", "broken/off")
    gets = [r for r in hub.mirror.requests_of("broken/off") if r.method == "GET"]
    firsts = [r.first_byte for r in gets if r.path.endswith("/model.safetensors")]
    assert firsts == [0, CHUNK, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK]


@pytest.mark.parametrize(
    ("by", "failure"),
    [*[("other", f) for f in ("silent", "busy", "gated")], ("run", "silent"), ("run", "gated")],
)
def test_models_that_were_fetched_before_are_taken_if_the_hub_fails(by, failure, hub):
    """By another program, or by `featcal calibrate` for a run through FusionBench."""
    name = f"kept-{by}/{failure}"
    repository = hub.mirror.add(name, Path(hub.clip) if by == "run" else hub.folder / "one")
    if by == "other":
        hub.ask("other", name)
    else:
        hub.expert("calibrate", name)  # ends behind the fetch: it is no language model
    repository.failure = failure
    message = hub.expert("run" if by == "run" else "calibrate", name)
    assert message == "" if by == "run" else "data 'no.jsonl' does not exist" in message


# --- files ---


def test_models_that_were_fetched_are_not_fetched_again(hub):
    mirror, folder = hub.mirror, hub.folder

    def add(name: str, source: Path) -> Repository:
        repository = mirror.add(name, source)
        repository.revisions["v1"] = repository.files
        return repository

    for name in ("base", "merged", *TASKS):
        repository = add(f"llama/{name}", folder / name)
        if name == "base":
            torch.save(load(repository.files.pop("model.safetensors")), folder / "base.bin")
            repository.files["pytorch_model.bin"] = (folder / "base.bin").read_bytes()
    for name in ("clip", "processor"):
        add(f"vision/{name}", Path(hub.clip))
    words = ["llama/merged", "--base", "llama/base", "--set", "samples_per_task=4", "--force"]
    for task in TASKS:
        words += ["--expert", f"{task}=llama/{task}@v1", "--data", f"{task}={folder / task}.jsonl"]
    assert hub.ask("calibrate", [*words, "--out", str(folder / "out"), "--plan"]) == ""
    screen = (folder / "screen").read_text()
    assert "to fetch: llama/merged, " in screen and "to fetch: llama/one@v1, " in screen
    assert not [*hub.cache.glob("models--llama--*/**/*.safetensors")]
    assert not (folder / "out").exists()
    models = {"_pretrained_": "vision/clip", "one": "vision/clip@v1"}
    pool = hub.pool | {"models": models, "processor": "vision/processor@v1"}
    for number in range(2):
        asked = len(mirror.requests)
        assert hub.ask("calibrate", [*words, "--out", str(folder / f"out-{number}")]) == ""
        assert hub.ask("run", pool) == ""
        gets = [request for request in mirror.requests[asked:] if request.method == "GET"]
        assert any("/resolve/" in request.path for request in gets) == (number == 0)
        for name in mirror.repositories:
            if name.startswith(("llama/", "vision/")):
                mirror.repositories[name].failure = "silent"
    versions = json.loads((folder / "out-1" / "provenance.json").read_text())["versions"]
    for name in ("llama/base", "llama/merged", *(f"llama/{task}@v1" for task in TASKS)):
        assert versions[name] == mirror.repositories[name.partition("@")[0]].commit


OTHERS = {
    "README.md": b"# A model",
    "flax_model.msgpack": b"flax",
    "tf_model.h5": b"tensorflow",
    "model.onnx": b"onnx",
    "original/consolidated.00.pth": b"Meta's",
    "original/params.json": b"{}",
    "optimizer.pt": b"Adam",
    "trainer_state.json": b"{}",
    "training_args.bin": b"arguments",
}
CONFIGS = {"config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"{{ text }}"}
INDEX = "model.safetensors.index.json"
READ = sorted([*CONFIGS, "model.safetensors"])


def model(content: bytes, name: str = "model.safetensors") -> dict[str, bytes]:
    return CONFIGS | OTHERS | {name: content}


@pytest.mark.parametrize(
    ("files", "read"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.safetensors", "model-1-of-1.safetensors", INDEX], ["model.safetensors", INDEX]),
        (["model-1-of-2.safetensors", "model-2-of-2.safetensors", INDEX],) * 2,
        (["model-1-of-1.safetensors", INDEX, "consolidated.safetensors"],
         ["model-1-of-1.safetensors", INDEX]),
        (["pytorch_model.bin", "tf_model.h5"], ["pytorch_model.bin"]),
        (["pytorch_model-1-of-1.bin", "pytorch_model.bin.index.json"],
         ["pytorch_model-1-of-1.bin"]),
        (["adapter_config.json", "adapter_model.bin"],) * 2,
        (["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"],
         ["adapter_config.json", "adapter_model.safetensors"]),
        (["tf_model.h5"], []),
    ],
)  # fmt: skip
def test_weights_are_safetensors_or_bin_and_nothing_else(files, read):
    assert sorted(needed_files({*CONFIGS, *OTHERS, *files})) == sorted([*CONFIGS, *read])


def test_a_model_is_announced_and_fetched_once_without_files_that_are_not_read(hub):
    hub.mirror.add("few/files", model(bytes(2 * 2**20)))
    hub.fetch("few/files", weights=False)  # as a processor
    assert hub.files_of("few/files") == sorted(CONFIGS)
    ((folder, commit),), screen = hub.fetch("few/files")
    assert screen.count("\n") == 1
    assert screen.startswith(f"fetching few/files, 2.00 MiB, to {hub.cache} (")
    asked = len(hub.mirror.requests)
    assert hub.fetch("few/files") == [[[folder, commit]], ""]
    assert len(hub.mirror.requests) == asked
    assert sorted(file.name for file in Path(folder).iterdir()) == READ
    assert hub.files_of("few/files") == READ
    assert commit == hub.mirror.repositories["few/files"].commit


def test_files_that_a_model_in_the_cache_lacks_are_fetched(hub):
    hub.mirror.add("half/model", weights())
    hub.expert("calibrate", "half/model")
    (weight,) = hub.cache.glob("models--half--model/snapshots/*/model.safetensors")
    weight.unlink()
    hub.expert("calibrate", "half/model")
    assert weight.is_file()


def test_models_that_do_not_fit_on_the_disk_are_refused_before_any_is_fetched(hub):
    for name in ("large/one", "large/two"):
        hub.mirror.add(name, model(bytes(2**20)))
    answer, _ = hub.fetch("large/one", "large/two", free=3 * 2**19)
    assert answer.startswith("large/one, large/two: 2 models, 2.00 MiB, do not fit on the disk of ")
    assert "1.50 MiB free. Make room, or set HF_HOME to a folder on another disk" in answer
    assert hub.files_of("large/one") == []


def test_revisions_renamed_models_and_a_path_with_an_at_sign(hub, tmp_path):
    repository = hub.mirror.add("old/new", model(b"new"))
    repository.revisions["v1"] = model(b"first")
    hub.mirror.renamed["then/called"] = "old/new"
    path = tmp_path / "old" / "new@v1"
    path.mkdir(parents=True)
    names = ("old/new", "old/new@v1", str(path), "then/called")
    (new, _), (first, commit), (local, no_commit), (renamed, _) = hub.fetch(*names)[0]
    contents = [Path(folder, "model.safetensors").read_bytes() for folder in (new, first, renamed)]
    assert contents == [b"new", b"first", b"new"]
    assert Path(local) == path and no_commit is None
    ((again, _),), _ = hub.fetch(f"old/new@{commit}")
    assert again == first
    assert "gives nothing of that name" in hub.fetch("old/new@v2")[0]


@pytest.mark.parametrize("number", [1, 2])
def test_bin_files_are_converted_once_with_every_tensor(number, hub, tmp_path):
    """A checkpoint in two files has its shared tensors in one and all others in the other."""
    sizes: Any = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(num_layers=1, **sizes))
    state = t5.state_dict()
    tied = ("embed_tokens.weight", "shared.weight", "lm_head.weight")
    shared = {name: tensor for name, tensor in state.items() if name.endswith(tied)}
    rest = {name: tensor for name, tensor in state.items() if name not in shared}
    split = {"pytorch_model-00001-of-00002.bin": shared, "pytorch_model-00002-of-00002.bin": rest}
    files = {"pytorch_model.bin": state} if number == 1 else split
    config = json.loads(t5.config.to_json_string()) | {"architectures": [type(t5).__name__]}
    contents = CONFIGS | OTHERS | {"config.json": json.dumps(config).encode()}
    for file, tensors in files.items():
        torch.save(tensors, tmp_path / file)
        contents[file] = (tmp_path / file).read_bytes()
    name = f"bins/{number}"
    hub.mirror.add(name, contents)
    ((folder, commit),), screen = hub.fetch(name)
    _, converting = screen.splitlines()
    assert converting.startswith(f"converting {', '.join(files)} of {name} to safetensors, once")
    assert commit == hub.mirror.repositories[name].commit
    dropped = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert SafetensorsExpert(folder).names() == state.keys() - dropped
    loaded: Any = T5ForConditionalGeneration.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    (weight,) = hub.cache.glob(f"models--bins--{number}/snapshots/*/{next(iter(files))}")
    weight.unlink()  # to save room
    assert hub.fetch(name) == [[[folder, commit]], ""]


def test_bin_files_of_adapters_and_those_that_hold_code(hub, tmp_path):
    matrix, file = torch.randn(3, 2), tmp_path / "weights"
    torch.save({"a": matrix, "b": matrix[:2], "c": 1}, file)  # two share their storage
    files = {"adapter_config.json": b"{}", "adapter_model.bin": file.read_bytes()}
    hub.mirror.add("bins/adapter", files)
    ((folder, _),), _ = hub.fetch("bins/adapter")
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    assert torch.equal(tensors["a"], matrix) and torch.equal(tensors["b"], matrix[:2])
    assert sorted(tensors) == ["a", "b"]
    torch.save({"a": Path("somewhere")}, file)
    hub.mirror.add("bins/code", model(file.read_bytes(), "pytorch_model.bin"))
    answer, _ = hub.fetch("bins/code")
    assert "pytorch_model.bin is damaged, or holds more than tensors, which alone" in answer
    assert not list(hub.cache.glob("models--bins--code/featcal/*/"))
