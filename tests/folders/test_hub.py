"""Models and data of the hub: only needed files are fetched, once, and failures have remedies.

The client of the hub is the real one. It runs in a separate process, online, and asks a mirror.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hub_mirror import Failure, Mirror
from made_folders import llama_folders
from safetensors.torch import load
from tiny_texts import TASKS
from transformers import T5Config, T5ForConditionalGeneration

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.hub_files import needed_files

AGAIN = "A second run goes on where this one stopped"
DRIVER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from fusion_bench_featcal import CalibrationError, hub_files
from fusion_bench_featcal.cli import main

def fetch(name, *, weights=True):
    try:
        folder = hub_files.fetch(name, f"--expert one={name}", weights=weights)
        return str(folder), hub_files.commits()[name]
    except CalibrationError as error:
        return str(error)

for line in sys.stdin:
    options, words = json.loads(line)
    with redirect_stdout(sys.stderr), redirect_stderr(io.StringIO()) as screen:
        answer = main(words) if options is None else fetch(*words, **options)
    print(json.dumps([answer, screen.getvalue()]), flush=True)
"""


class Hub(NamedTuple):
    """A process that uses a mirror, with a separate cache, and local models and data."""

    mirror: Mirror
    folder: Path
    cache: Path
    process: "subprocess.Popen[str]"

    def _ask(self, options: Any, words: Any) -> Any:
        pipes: Any = self.process
        print(json.dumps([options, words]), file=pipes.stdin, flush=True)
        answer = pipes.stdout.readline()
        assert answer, (self.folder / "screen").read_text()[-3000:]
        return json.loads(answer)

    def fetch(self, name: str, **options: Any) -> Any:
        """Fetch a model: its folder and commit, or the error's message, and the screen."""
        return self._ask(options, [name])

    def calibrate(self, *words: str, expect: int = 0) -> str:
        """Run `featcal calibrate` and return its errors."""
        code, screen = self._ask(None, ["calibrate", *words])
        assert code == expect, screen
        return screen

    def refused(self, expert: str) -> str:
        """The error of a run for one expert, which ends behind its models for lack of data."""
        base = str(self.folder / "base")
        words = [base, "--base", base, "--expert", f"one={expert}", "--data", "one=no.jsonl"]
        screen = self.calibrate(*words, "--out", str(self.folder / "never"), expect=2)
        (line,) = (line for line in screen.splitlines() if "featcal: error" in line)
        return line


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    llama_folders(folder)
    with Mirror() as mirror, (folder / "screen").open("w") as screen:
        environment = mirror.environment(folder / "home")
        environment |= {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": screen}
        words = [sys.executable, "-c", DRIVER]
        with subprocess.Popen(words, env=environment, cwd=folder, text=True, **pipes) as process:
            yield Hub(mirror, folder, folder / "home" / "hub", process)
            process.kill()


# --- failures ---

NO_DATA = "data 'no.jsonl' does not exist"
AWAY = ["the hub at http://127.0.0.1", "does not answer. Check the network", AGAIN]
FAILURES: dict[Failure, list[str]] = {
    "missing": ["the hub gives nothing of that name. Correct it, or log in if it is private"],
    "gated": ["access is restricted. Ask for it on the hub's page and log in (hf auth login)"],
    "busy": ["the hub is busy (503). Wait, or log in", AGAIN],
    "limited": ["the hub is busy (429). Wait 55 s, or log in", AGAIN],
    "cut": AWAY,
    "silent": AWAY,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_each_failure_has_its_setting_and_remedy(failure: Failure, hub: Hub):
    name = f"failing/{failure}"
    repository = hub.mirror.add(name, hub.folder / "one", failure)
    message = hub.refused(name)
    for words in (f"--expert one={name}: ", *FAILURES[failure]):
        assert words in message
    assert message.endswith(AGAIN) == (AGAIN in FAILURES[failure]) and len(message) < 350
    requests = [r for r in hub.mirror.requests if r.path == f"/api/models/{name}"]
    assert len(requests) == 1  # the hub's client knows when to try again
    if failure in ("busy", "cut"):
        repository.times = 0
        assert NO_DATA in hub.refused(name)


# --- files ---

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


def saved(tensors: Any, file: Path) -> bytes:
    """Content of a `.bin` file."""
    torch.save(tensors, file)
    return file.read_bytes()


def test_models_of_a_run_are_announced_and_fetched_once(hub: Hub):
    mirror, folder = hub.mirror, hub.folder
    names = [f"llama/{name}" for name in ("base", "merged", *TASKS)]
    for name in names:
        repository = mirror.add(name, folder / name.partition("/")[2])
        repository.revisions["v1"] = repository.files
    base = mirror.repositories["llama/base"].files
    weights = load(base.pop("model.safetensors"))
    base["pytorch_model.bin"] = saved(weights, folder / "base.bin")
    words = ["llama/merged", "--base", "llama/base", "--set", "samples_per_task=4", "--no-eval"]
    for task in TASKS:
        words += ["--expert", f"{task}=llama/{task}@v1", "--data", f"{task}={folder / task}.jsonl"]
    hub.calibrate(*words, "--out", str(folder / "out"), "--plan")
    screen = (folder / "screen").read_text()
    assert "to fetch: llama/merged, " in screen and "to fetch: llama/one@v1, " in screen
    assert not [*hub.cache.glob("models--llama--*/**/*.safetensors")]
    assert not (folder / "out").exists()
    for number in range(2):
        before = len(mirror.requests)
        hub.calibrate(*words, "--out", str(folder / f"out-{number}"))
        gets = [request for request in mirror.requests[before:] if request.method == "GET"]
        assert any("/resolve/" in request.path for request in gets) == (number == 0)
        for name in names:
            mirror.repositories[name].failure = "silent"
    versions = json.loads((folder / "out-1" / "provenance.json").read_text())["versions"]
    for name in ("llama/base", "llama/merged", *(f"llama/{task}@v1" for task in TASKS)):
        assert versions[name] == mirror.repositories[name.partition("@")[0]].commit


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


def test_only_files_that_are_read_are_fetched_and_again_if_they_are_lost(hub: Hub):
    repository = hub.mirror.add("few/files", model(bytes(2 * 2**20)))
    hub.fetch("few/files", weights=False)  # as a processor
    assert sorted(hub.mirror.files_sent("few/files")) == sorted(CONFIGS)
    (folder, commit), screen = hub.fetch("few/files")
    assert screen.startswith(f"fetching few/files, 2.00 MiB, to {hub.cache} (")
    needed = sorted([*CONFIGS, "model.safetensors"])
    assert sorted(file.name for file in Path(folder).iterdir()) == needed
    assert sorted(hub.mirror.files_sent("few/files")) == needed
    assert commit == repository.commit
    (Path(folder) / "model.safetensors").unlink()
    hub.fetch("few/files")
    assert (Path(folder) / "model.safetensors").is_file()


def test_a_model_larger_than_the_disk_is_refused_before_it_is_fetched(hub: Hub):
    repository = hub.mirror.add("large/model", model(b"weights"))
    repository.sizes["model.safetensors"] = 2**60
    answer, _ = hub.fetch("large/model")
    assert "no room for " in answer
    assert "free. Make room, or set HF_HOME to a folder on another disk" in answer
    assert not hub.mirror.files_sent("large/model")


def test_a_whole_model_in_the_cache_is_taken_if_the_hub_fails(hub: Hub):
    repository = hub.mirror.add("cached/model", model(b"new"))
    repository.revisions["v1"] = model(b"first")
    for name, content in (("cached/model@v1", b"first"), ("cached/model", b"new")):
        (folder, commit), _ = hub.fetch(name)
        assert Path(folder, "model.safetensors").read_bytes() == content
    assert "gives nothing of that name" in hub.fetch("cached/model@v2")[0]
    (marker,) = hub.cache.glob(f"models--cached--model/featcal/{commit}.whole")
    marker.unlink()  # as if another program had fetched it
    repository.failure = "busy"
    before = len(hub.mirror.requests)
    assert hub.fetch("cached/model@main")[0] == [folder, commit]  # not asked for before
    assert len(hub.mirror.requests) == before + 1


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
        contents[file] = saved(tensors, tmp_path / file)
    repository = hub.mirror.add("bins/two", contents)
    (folder, commit), screen = hub.fetch("bins/two")
    converting = f"converting {', '.join(split)} of bins/two to safetensors, once"
    assert screen.splitlines()[1].startswith(converting) and commit == repository.commit
    dropped = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert SafetensorsExpert(folder).names() == state.keys() - dropped
    loaded: Any = T5ForConditionalGeneration.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    (weight,) = hub.cache.glob(f"models--bins--two/snapshots/*/{split[0]}")
    weight.unlink()  # to save room
    assert hub.fetch("bins/two") == [[folder, commit], ""]


def test_bin_files_that_hold_code_are_refused(hub: Hub, tmp_path: Path):
    code = saved({"a": Path("somewhere")}, tmp_path / "weights")
    hub.mirror.add("bins/code", model(code, "pytorch_model.bin"))
    answer, _ = hub.fetch("bins/code")
    assert "pytorch_model.bin is damaged, or holds more than tensors, which alone" in answer
    assert not list(hub.cache.glob("models--bins--code/featcal/*/"))
