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
from safetensors.torch import load, load_file
from tiny_texts import TASKS

AGAIN = "run the command again. The download resumes"
DRIVER = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from fusion_bench_featcal import CalibrationError
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.models import hub

def fetch(name, *, weights=True):
    try:
        folder = hub.fetch(name, f"--expert one={name}", weights=weights)
        return str(folder), hub.commits()[name]
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
        words = [base, "--base", base, "--expert", f"one={expert}", "--data", "one=no"]
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

NO_DATA = "data 'no', split 'train': there is no such file"
AWAY = ["the hub at http://127.0.0.1", "does not answer. Check the network and", AGAIN]
FAILURES: dict[Failure, list[str]] = {
    "missing": ["nothing of that name on the hub. Correct it, or log in (hf auth login) if it is"],
    "gated": ["access is restricted. Ask for it on the hub's page and log in"],
    "busy": ["the hub is busy (503). Wait, or log in", AGAIN],
    "limited": ["the hub is busy (429). Wait, or log in", AGAIN],
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


def test_all_models_of_a_run_are_fetched_at_once_and_the_base_may_be_a_bin_file(hub: Hub):
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
        screen = hub.calibrate(*words, "--out", str(folder / f"out-{number}"))
        assert screen.count(f"downloading {len(names)} models: ") == (number == 0)
        requests = [request.path for request in mirror.requests[before:]]
        assert any("/resolve/" in path for path in requests) == (number == 0)
        for name in names:
            mirror.repositories[name].failure = "silent"
    versions = json.loads((folder / "out-1" / "featcal" / "run.json").read_text())["versions"]
    for name in ("llama/base", "llama/merged", *(f"llama/{task}@v1" for task in TASKS)):
        assert versions[name] == mirror.repositories[name.partition("@")[0]].commit
    local = ["--base", str(folder / "base"), *words[3:]]
    hub.calibrate(words[0], *local, "--out", str(folder / "out-local"))
    results = [load_file(folder / out / "model.safetensors") for out in ("out-1", "out-local")]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[1])


POOLING = {"modules.json": b"[]", "1_Pooling/config.json": b"{}",
           **{f"2_Dense/{name}": b"" for name in ("config.json", "model.safetensors")}}  # fmt: skip
SHARDS = ("model-1-of-1.safetensors", "model.safetensors.index.json")
BINS = ("pytorch_model-1-of-1.bin", "pytorch_model.bin.index.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("needed", "others"),
    [
        (dict.fromkeys(SHARDS, b"{}"), ["consolidated.pth"]),
        (dict.fromkeys(BINS, b"{}"), ["onnx/config.json"]),
        (dict.fromkeys(ADAPTER, b"{}"), ["adapter_model.bin"]),
        ({"model.safetensors": b"", **POOLING},
         ["pytorch_model.bin", "onnx/model.safetensors", "0_Transformer/model.safetensors"]),
    ],
    ids=("shards", "bins", "adapter", "modules"),
)  # fmt: skip
def test_only_files_that_are_read_are_fetched(hub: Hub, needed: Any, others: list[str], request):
    name = f"files/{request.node.callspec.id}"
    hub.mirror.add(name, CONFIGS | UNUSED | needed | dict.fromkeys(others, b"other"))
    hub.fetch(name, weights=False)  # as a processor
    assert not [f for f in hub.mirror.files_sent(name) if f.endswith((".safetensors", ".bin"))]
    (folder, commit), screen = hub.fetch(name)
    files = {str(f.relative_to(folder)) for f in Path(folder).rglob("*") if f.is_file()}
    assert files == {*CONFIGS, *needed}
    assert commit == hub.mirror.repositories[name].commit
    assert screen.startswith(f"downloading {name}: ") and f", to {hub.cache}" in screen


def test_a_model_larger_than_the_disk_is_refused_before_it_is_fetched(hub: Hub):
    repository = hub.mirror.add("large/model", model(b"weights"))
    repository.sizes["model.safetensors"] = 2**60
    answer, _ = hub.fetch("large/model")
    assert answer.startswith("large/model: 4 files, 1073741824.0 GiB: no room on the disk of ")
    assert answer.endswith("free. Make room, or set HF_HOME to a folder on another disk")
    assert not hub.mirror.files_sent("large/model")


def test_the_cached_version_of_a_model_is_used_if_the_hub_fails(hub: Hub):
    repository = hub.mirror.add("cached/model", model(b"new"))
    repository.revisions["v1"] = model(b"first")
    for name, content in (("cached/model@v1", b"first"), ("cached/model", b"new")):
        (folder, commit), _ = hub.fetch(name)
        assert Path(folder, "model.safetensors").read_bytes() == content
    assert "nothing of that name on the hub" in hub.fetch("cached/model@v2")[0]
    repository.failure = "busy"
    assert hub.fetch("cached/model@main")[0] == [folder, commit]  # another name of the same
    Path(folder, "model.safetensors").unlink()
    assert "the hub is busy" in hub.fetch(f"cached/model@{commit}")[0]


def test_bin_files_that_hold_code_are_refused(hub: Hub):
    code = saved({"a": Path("somewhere")}, hub.folder / "weights")
    files = {file.name: file.read_bytes() for file in (hub.folder / "one").iterdir()}
    del files["model.safetensors"]
    hub.mirror.add("bins/code", files | {"pytorch_model.bin": code})
    message = hub.refused("bins/code")
    assert "--expert one=bins/code: cannot be loaded: its .bin file is damaged or has" in message
