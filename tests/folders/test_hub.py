"""Models and data of the hub: only needed files are fetched, once, and failures have remedies.

The client of the hub is the real one. It runs in a separate process, online, and asks a mirror.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_mirror import Failure, Mirror
from made_folders import llama_folders
from safetensors.torch import load, load_file
from tiny_images import write_class_folders, write_clip
from tiny_texts import TASKS
from transformers import T5Config, T5ForConditionalGeneration

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.hub_errors import RETRIES
from fusion_bench_featcal.hub_files import needed_files

AGAIN = "A second run goes on where this one stopped"
DRIVER = """
import contextlib, io, json, sys
from types import SimpleNamespace
import fusion_bench_featcal.algorithm
from fusion_bench.modelpool import CLIPVisionModelPool
from huggingface_hub import snapshot_download
from omegaconf import OmegaConf
from fusion_bench_featcal import CalibrationError, hub_errors, hub_files
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.cli import main

MERGER = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
free_space = hub_files.free_space
hub_errors.time = SimpleNamespace(sleep=lambda _: None)  # 3.5 s for each model that fails

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

DOORS = {"calibrate": calibrate, "run": run, "fetch": fetch, "other program": snapshot_download}
for line in sys.stdin:
    name, argument = json.loads(line)
    with contextlib.redirect_stdout(sys.stderr):
        answer = DOORS[name](argument)
    print(json.dumps(answer), flush=True)
"""


class Hub:
    """A process that uses a mirror, with a separate cache, and local models and data."""

    def __init__(self, mirror: Mirror, folder: Path) -> None:
        """Write models and data, and start the process."""
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
        """Enter a door and return its answer, mostly the message of the error that ended it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([door, argument]) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.folder / "screen").read_text()[-3000:]
        return json.loads(answer)

    def fetch(self, *names: str, weights: bool = True, free: int | None = None) -> Any:
        """Fetch models and return folders and commits, or the error's message, and the screen."""
        locations = {f"--expert x{number}={name}": name for number, name in enumerate(names)}
        return self.ask("fetch", [locations, weights, free])

    def run(self, **changes: Any) -> str:
        """Run through FusionBench with a pool of which some entries are changed."""
        return self.ask("run", self.pool | changes)

    def calibrate(self, expert: str, data: str = "no.jsonl", *more: str) -> str:
        """Run `featcal calibrate` for a single expert, as a rule without data."""
        base = str(self.folder / "base")
        named = ["--base", base, "--expert", f"one={expert}", "--data", f"one={data}"]
        return self.ask("calibrate", [base, *named, "--out", str(self.folder / "never"), *more])


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    with Mirror() as mirror:
        opened = Hub(mirror, tmp_path_factory.mktemp("hub"))
        with opened.process:
            yield opened
            opened.process.kill()


# --- failures ---

NO_DATA = "data 'no.jsonl' does not exist"
"""The message of a run that ends behind its models."""
RESTRICTED = "access is restricted. Ask for it on the hub's page and log in (hf auth login)"
LOAD = {"_target_": "datasets.load_dataset", "split": "train"}
AWAY = ["the hub at http://127.0.0.1", "does not answer. Check the network", AGAIN]
FAILURES: dict[Failure, list[str]] = {
    "missing": ["the hub gives nothing of that name. Correct it, or log in if it is private"],
    "gated": [RESTRICTED],
    "busy": ["the hub is busy (503). Wait, or log in", AGAIN],
    "limited": ["the hub is busy (429). Wait, or log in", AGAIN],
    "cut": AWAY,
    "silent": AWAY,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_has_its_setting_and_remedy(failure: Failure, hub: Hub):
    name = f"failing/{failure}"
    repository = hub.mirror.add(name, hub.folder / "one", failure)
    message = hub.calibrate(name)
    for words in (f"--expert one={name}: ", *FAILURES[failure]):
        assert words in message
    assert message.endswith(AGAIN) == (AGAIN in FAILURES[failure]) and len(message) < 350
    requests = [r for r in hub.mirror.requests_of(name) if r.path == f"/api/models/{name}"]
    assert len(requests) == 1 + RETRIES * (failure in ("busy", "limited"))
    if failure in ("busy", "limited", "cut"):  # and passes, it is no error
        repository.times = RETRIES
        assert NO_DATA in hub.calibrate(name)


GATED = {name: b"{}" for name in ("config.json", "model.safetensors", "train.jsonl")}
DOORS: dict[str, tuple[Callable[[Hub, str], str], str]] = {
    "run, model": (lambda hub, name: hub.run(models=hub.pool["models"] | {"one": name}),
                   "modelpool.models.one={}: "),
    "run, processor": (lambda hub, name: hub.run(processor=name), "modelpool.processor={}: "),
    "run, data": (lambda hub, name: hub.run(train_datasets={"one": LOAD | {"path": name}}),
                  "modelpool.train_datasets.one='{}': "),
    "calibrate, tokenizer": (
        lambda hub, name: hub.calibrate("one", "one.jsonl", "--tokenizer", name),
        "--tokenizer {}: "),
    "calibrate, data": (lambda hub, name: hub.calibrate("one", f"{name}:train"), "data '{}'"),
}  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
def test_a_restricted_repository_is_named_at_each_door(door: str, hub: Hub):
    (enter, setting), name = DOORS[door], door.replace(", ", "/")
    for repository in (name, f"datasets/{name}"):
        hub.mirror.add(repository, GATED, "gated")
    message = enter(hub, name)
    assert setting.format(name) in message and RESTRICTED in message


def test_models_in_the_cache_are_taken_if_the_hub_fails(hub: Hub):
    """Fetched by another program, or by `featcal calibrate` for a run through FusionBench."""
    repository = hub.mirror.add("cached/model", hub.folder / "one")
    hub.ask("other program", "cached/model")
    repository.failure = "busy"
    assert NO_DATA in hub.calibrate("cached/model")
    repository = hub.mirror.add("cached/clip", Path(hub.clip))
    hub.calibrate("cached/clip")  # ends after the download: it is no language model
    repository.failure = "gated"
    assert hub.run(models=hub.pool["models"] | {"one": "cached/clip"}) == ""


# --- files ---


def test_models_that_were_fetched_are_not_fetched_again(hub: Hub):
    mirror, folder = hub.mirror, hub.folder
    sources = {f"llama/{name}": folder / name for name in ("base", "merged", *TASKS)}
    sources |= dict.fromkeys(("vision/clip", "vision/processor"), Path(hub.clip))
    for name, source in sources.items():
        repository = mirror.add(name, source)
        repository.revisions["v1"] = repository.files
    base = mirror.repositories["llama/base"].files
    torch.save(load(base.pop("model.safetensors")), folder / "base.bin")
    base["pytorch_model.bin"] = (folder / "base.bin").read_bytes()
    words = ["llama/merged", "--base", "llama/base", "--set", "samples_per_task=4", "--force"]
    for task in TASKS:
        words += ["--expert", f"{task}=llama/{task}@v1", "--data", f"{task}={folder / task}.jsonl"]
    assert hub.ask("calibrate", [*words, "--out", str(folder / "out"), "--plan"]) == ""
    screen = (folder / "screen").read_text()
    assert "to fetch: llama/merged, " in screen and "to fetch: llama/one@v1, " in screen
    assert not [*hub.cache.glob("models--llama--*/**/*.safetensors")]
    assert not (folder / "out").exists()
    models = {"_pretrained_": "vision/clip", "one": "vision/clip@v1"}
    for number in range(2):
        before = len(mirror.requests)
        assert hub.ask("calibrate", [*words, "--out", str(folder / f"out-{number}")]) == ""
        assert hub.run(models=models, processor="vision/processor@v1") == ""
        gets = [request for request in mirror.requests[before:] if request.method == "GET"]
        assert any("/resolve/" in request.path for request in gets) == (number == 0)
        for name in sources:
            mirror.repositories[name].failure = "silent"
    versions = json.loads((folder / "out-1" / "provenance.json").read_text())["versions"]
    for name in ("llama/base", "llama/merged", *(f"llama/{task}@v1" for task in TASKS)):
        assert versions[name] == mirror.repositories[name.partition("@")[0]].commit


UNUSED = {
    "README.md": b"# A model",
    "tf_model.h5": b"tensorflow",
    "original/consolidated.00.pth": b"Meta's",
    "trainer_state.json": b"{}",
    "training_args.bin": b"arguments",
}
CONFIGS = {"config.json": b"{}", "tokenizer.json": b"[]", "chat_template.jinja": b"{{ text }}"}


def model(content: bytes, name: str = "model.safetensors") -> dict[str, bytes]:
    return CONFIGS | UNUSED | {name: content}


def test_weights_are_safetensors_or_bin_and_nothing_else():
    shards = ["model-1-of-1.safetensors", "model.safetensors.index.json"]
    for weights, copies in (
        (["model.safetensors"], ["pytorch_model.bin"]),
        (shards, ["consolidated.safetensors"]),
        (["pytorch_model-1-of-1.bin"], ["pytorch_model.bin.index.json"]),
        (["adapter_config.json", "adapter_model.safetensors"], ["adapter_model.bin"]),
    ):
        needed = needed_files({*CONFIGS, *UNUSED, *weights, *copies})
        assert sorted(needed) == sorted([*CONFIGS, *weights])


def test_a_model_is_announced_and_fetched_once_without_files_that_are_not_read(hub: Hub):
    repository = hub.mirror.add("few/files", model(bytes(2 * 2**20)))
    hub.fetch("few/files", weights=False)  # as a processor
    assert sorted(hub.mirror.files_sent("few/files")) == sorted(CONFIGS)
    ((folder, commit),), screen = hub.fetch("few/files")
    assert screen.count("\n") == 1
    assert screen.startswith(f"fetching few/files, 2.00 MiB, to {hub.cache} (")
    before, needed = len(hub.mirror.requests), sorted([*CONFIGS, "model.safetensors"])
    assert hub.fetch("few/files") == [[[folder, commit]], ""]
    assert len(hub.mirror.requests) == before
    assert sorted(file.name for file in Path(folder).iterdir()) == needed
    assert sorted(hub.mirror.files_sent("few/files")) == needed
    assert commit == repository.commit
    (Path(folder) / "model.safetensors").unlink()
    hub.fetch("few/files")
    assert (Path(folder) / "model.safetensors").is_file()


def test_models_that_do_not_fit_on_the_disk_are_refused_before_any_is_fetched(hub: Hub):
    for name in ("large/one", "large/two"):
        hub.mirror.add(name, model(bytes(2**20)))
    answer, _ = hub.fetch("large/one", "large/two", free=3 * 2**19)
    assert answer.startswith("large/one, large/two: 2 models, 2.00 MiB, do not fit on the disk of ")
    assert "1.50 MiB free. Make room, or set HF_HOME to a folder on another disk" in answer
    assert not hub.mirror.files_sent("large/one")


def test_revisions_and_renamed_models(hub: Hub):
    repository = hub.mirror.add("old/new", model(b"new"))
    repository.revisions["v1"] = model(b"first")
    hub.mirror.renamed["then/called"] = "old/new"
    answers = hub.fetch("old/new", "old/new@v1", "then/called")[0]
    files = [Path(folder, "model.safetensors") for folder, _ in answers]
    assert [file.read_bytes() for file in files] == [b"new", b"first", b"new"]
    assert hub.fetch(f"old/new@{answers[1][1]}")[0] == [answers[1]]
    assert "gives nothing of that name" in hub.fetch("old/new@v2")[0]


def test_bin_files_are_converted_once_with_every_tensor(hub: Hub, tmp_path: Path):
    """A checkpoint in two files has its shared tensors in one and all others in the other."""
    sizes: Any = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2}
    t5 = T5ForConditionalGeneration(T5Config(num_layers=1, **sizes))
    state, split = t5.state_dict(), [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]
    tied = ("embed_tokens.weight", "shared.weight", "lm_head.weight")
    config = json.loads(t5.config.to_json_string()) | {"architectures": [type(t5).__name__]}
    contents = model(json.dumps(config).encode(), "config.json")
    for file, is_shared in zip(split, (True, False), strict=True):
        tensors = {name: t for name, t in state.items() if name.endswith(tied) == is_shared}
        torch.save(tensors, tmp_path / file)
        contents[file] = (tmp_path / file).read_bytes()
    repository = hub.mirror.add("bins/two", contents)
    ((folder, commit),), screen = hub.fetch("bins/two")
    converting = f"converting {', '.join(split)} of bins/two to safetensors, once"
    assert screen.splitlines()[1].startswith(converting) and commit == repository.commit
    dropped = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert SafetensorsExpert(folder).names() == state.keys() - dropped
    loaded: Any = T5ForConditionalGeneration.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    (weight,) = hub.cache.glob(f"models--bins--two/snapshots/*/{split[0]}")
    weight.unlink()  # to save room
    assert hub.fetch("bins/two") == [[[folder, commit]], ""]


def test_bin_files_of_adapters_and_those_that_hold_code(hub: Hub, tmp_path: Path):
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
