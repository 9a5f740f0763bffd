"""Files of the hub: which are fetched, what is said before, revisions, and weights in `.bin`."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_mirror import Mirror
from safetensors.torch import load_file
from transformers import T5Config, T5ForConditionalGeneration

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.hub_files import needed_files

DRIVER = """
import contextlib, io, json, sys
from fusion_bench_featcal import CalibrationError, hub_files
from fusion_bench_featcal.hub_files import fetch_all, commits

free_space = hub_files.free_space
for line in sys.stdin:
    locations, weights, free = json.loads(line)
    hub_files.free_space = free_space if free is None else lambda folder: free
    with contextlib.redirect_stderr(io.StringIO()) as screen:
        try:
            folders = fetch_all(locations, weights=weights)
            used = commits()
            answer = [[str(folders[key]), used.get(name)] for key, name in locations.items()]
        except CalibrationError as error:
            answer = str(error)
    print(json.dumps([answer, screen.getvalue()]), flush=True)
"""


class Fetching:
    """A process that fetches from a mirror into a cache of its own."""

    def __init__(self, mirror: Mirror, home: Path) -> None:
        """Start the process."""
        self.mirror = mirror
        self.cache = home / "hub"
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER],
            env=mirror.environment(home),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *names: str, weights: bool = True, free: int | None = None) -> Any:
        """Fetch models; return folders and commits, or the error's message, and the screen."""
        assert self.process.stdin is not None and self.process.stdout is not None
        wanted = {f"--expert x{number}={name}": name for number, name in enumerate(names)}
        self.process.stdin.write(json.dumps([wanted, weights, free]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def files_of(self, name: str) -> list[str]:
        """Files that were downloaded of a model."""
        gets = [r.path for r in self.mirror.requests_of(name) if r.method == "GET"]
        return sorted(path.rpartition("/")[2] for path in gets if "/resolve/" in path)


@pytest.fixture(scope="module")
def fetching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fetching]:
    with Mirror() as mirror:
        made = Fetching(mirror, tmp_path_factory.mktemp("home"))
        with made.process:
            yield made
            made.process.kill()


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


def model(**weights: bytes) -> dict[str, bytes]:
    return CONFIGS | OTHERS | {name.replace("__", "."): data for name, data in weights.items()}


@pytest.mark.parametrize(
    ("weights", "read"),
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
def test_weights_are_safetensors_or_bin_and_nothing_else(weights, read):
    assert sorted(needed_files({*CONFIGS, *OTHERS, *weights})) == sorted([*CONFIGS, *read])


def test_a_model_is_announced_and_fetched_once_without_what_nobody_reads(fetching):
    fetching.mirror.add("few/files", model(model__safetensors=bytes(2 * 2**20)))
    ((folder, commit),), screen = fetching("few/files")
    assert screen.count("\n") == 1
    assert screen.startswith(f"fetching few/files, 2.00 MiB, to {fetching.cache} (")
    asked = len(fetching.mirror.requests)
    assert fetching("few/files") == [[[folder, commit]], ""]
    assert len(fetching.mirror.requests) == asked
    assert sorted(file.name for file in Path(folder).iterdir()) == sorted(
        [*CONFIGS, "model.safetensors"]
    )
    assert commit == fetching.mirror.repositories["few/files"].commit
    assert fetching.files_of("few/files") == sorted([*CONFIGS, "model.safetensors"])


def test_processors_come_without_weights_which_a_later_call_fetches(fetching):
    fetching.mirror.add("own/processor", model(model__safetensors=bytes(100)))
    fetching("own/processor", weights=False)
    assert fetching.files_of("own/processor") == sorted(CONFIGS)
    fetching("own/processor")
    assert fetching.files_of("own/processor") == sorted([*CONFIGS, "model.safetensors"])


def test_models_that_do_not_fit_on_the_disk_are_refused_before_any_is_fetched(fetching):
    for name in ("large/one", "large/two"):
        fetching.mirror.add(name, model(model__safetensors=bytes(2**20)))
    answer, _ = fetching("large/one", "large/two", free=3 * 2**19)
    assert answer.startswith("large/one, large/two: 2 models, 2.00 MiB, do not fit on the disk of ")
    assert "1.50 MiB free. Make room, or set HF_HOME to a folder on another disk" in answer
    assert fetching.files_of("large/one") == []


def test_a_revision_is_fetched_and_a_path_with_an_at_sign_is_a_path(fetching, tmp_path):
    repository = fetching.mirror.add("old/new", model(model__safetensors=b"new"))
    repository.revisions["v1"] = model(model__safetensors=b"first")
    path = tmp_path / "old" / "new@v1"
    path.mkdir(parents=True)
    (new, _), (first, commit), (local, no_commit) = fetching("old/new", "old/new@v1", str(path))[0]
    assert Path(new, "model.safetensors").read_bytes() == b"new"
    assert Path(first, "model.safetensors").read_bytes() == b"first"
    assert Path(local) == path and no_commit is None
    ((again, _),), _ = fetching(f"old/new@{commit}")
    assert again == first
    assert "gives nothing of that name" in fetching("old/new@v2")[0]


def test_a_renamed_model_is_found_under_its_new_name(fetching):
    fetching.mirror.add("now/called", model(model__safetensors=b"weights"))
    fetching.mirror.renamed["then/called"] = "now/called"
    ((folder, _),), _ = fetching("then/called")
    assert Path(folder, "model.safetensors").read_bytes() == b"weights"


def saved(folder: Path, state: Mapping[str, torch.Tensor], *files: str) -> dict[str, bytes]:
    """Files of a model whose tensors lie in so many `.bin` files, the first has what is shared."""
    names = sorted(state)
    shared = [name for name in names if "embed_tokens" in name or "shared" in name]
    others = [name for name in names if name not in shared]
    groups = [shared + others[len(others) // 2 :], others[: len(others) // 2]]
    contents = dict(CONFIGS)
    for file, group in zip(files, groups if len(files) > 1 else [names], strict=True):
        torch.save({name: state[name] for name in group}, folder / file)
        contents[file] = (folder / file).read_bytes()
    return contents


def t5() -> T5ForConditionalGeneration:
    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize(
    "files",
    [["pytorch_model.bin"], [f"pytorch_model-0000{n}-of-00002.bin" for n in (1, 2)]],
)
def test_bin_files_are_converted_once_with_every_tensor(files, fetching, tmp_path):
    name, made = f"bins/{len(files)}", t5()
    state = made.state_dict()
    contents = saved(tmp_path, state, *files)
    contents["config.json"] = made.config.to_json_string().encode()
    config = json.loads(contents["config.json"]) | {"architectures": [type(made).__name__]}
    fetching.mirror.add(name, OTHERS | contents | {"config.json": json.dumps(config).encode()})
    ((folder, commit),), screen = fetching(name)
    announced, converting = screen.splitlines()
    assert "of .bin files converted, to " in announced
    assert converting == f"converting {', '.join(files)} of {name} to safetensors, once"
    assert commit == fetching.mirror.repositories[name].commit
    source = SafetensorsExpert(folder)
    dropped = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert source.names() == state.keys() - dropped
    loaded: Any = T5ForConditionalGeneration.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[key], state[key]) for key in state)
    weights = next(fetching.cache.glob(f"models--bins--{len(files)}/snapshots/*/{files[0]}"))
    weights.unlink()  # to save room
    assert fetching(name) == [[[folder, commit]], ""]


def test_shared_tensors_of_an_adapter_are_copied(fetching, tmp_path):
    matrix = torch.randn(3, 2)
    torch.save({"a": matrix, "b": matrix[:2], "c": 1}, tmp_path / "adapter_model.bin")
    files = {"adapter_config.json": b"{}"}
    files["adapter_model.bin"] = (tmp_path / "adapter_model.bin").read_bytes()
    fetching.mirror.add("bins/adapter", files)
    ((folder, _),), _ = fetching("bins/adapter")
    tensors = load_file(Path(folder, "adapter_model.safetensors"))
    assert torch.equal(tensors["a"], matrix) and torch.equal(tensors["b"], matrix[:2])
    assert sorted(tensors) == ["a", "b"]


def test_a_bin_file_that_holds_code_is_refused_and_nothing_is_left(fetching, tmp_path):
    torch.save({"a": Path("somewhere")}, tmp_path / "weights")
    fetching.mirror.add("bins/code", model(pytorch_model__bin=(tmp_path / "weights").read_bytes()))
    answer, _ = fetching("bins/code")
    assert "pytorch_model.bin is damaged, or holds more than tensors, which alone" in answer
    assert not list(fetching.cache.glob("models--bins--code/featcal/*/"))
