"""Experts' next tensors are asked for while others are in use: exactly those, at no cost."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import run_fast
from safetensors.torch import save_file
from test_expert_files import is_open
from test_experts_lora import write_adapter
from tiny_models import Suite, clip_suite, t5_suite
from tiny_texts import t5_model
from torch import Tensor

from fusion_bench_featcal import InMemoryExpert, SafetensorsExpert
from fusion_bench_featcal.checkpoints.sources import WatchedSource
from fusion_bench_featcal.experts import ExpertModel
from fusion_bench_featcal.experts.fetching import copied_to
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.families.unfused import UnfusedSource

TENSORS = {
    "a": torch.arange(100_000.0),
    "b": torch.arange(7.0).half(),
    "c": torch.arange(5) + 1000,
    "empty": torch.empty(0, 3),
}


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, int, int]]:
    """File name, first byte and number of bytes of every request to the system."""
    found: list[tuple[str, int, int]] = []

    def advise(descriptor: int, first: int, size: int, advice: int) -> None:
        assert advice == WILL_NEED
        found.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, first, size))

    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", WILL_NEED, raising=False)
    monkeypatch.setattr(os, "posix_fadvise", advise, raising=False)
    return found


WILL_NEED = 3


def stored(folder: Path) -> Path:
    save_file(TENSORS, folder / "model.safetensors", {"format": "pt"})
    return folder / "model.safetensors"


@pytest.mark.parametrize("names", [["a"], ["b"], ["c", "b"], ["a", "c"], list(TENSORS), []])
def test_asks_for_exactly_the_bytes_of_the_named_tensors(asked, tmp_path, names):
    data = stored(tmp_path).read_bytes()
    SafetensorsExpert(tmp_path).expect([*names, "unknown"])
    found = b"".join(data[first : first + size] for _, first, size in asked)
    order = sorted(names, key=lambda name: data.find(TENSORS[name].numpy().tobytes()))
    assert found == b"".join(TENSORS[name].numpy().tobytes() for name in order)
    # more than a device's read-ahead in one request is not read
    assert all(0 < size <= 128 * 1024 for _, _, size in asked)


def test_sharded_checkpoint_asks_in_every_file(asked, tmp_path):
    for name in ("a", "b"):
        save_file({name: TENSORS[name]}, tmp_path / f"{name}.safetensors")
    index = '{"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    SafetensorsExpert(tmp_path).expect(["b", "a"])
    assert {file for file, _, _ in asked} == {"a.safetensors", "b.safetensors"}
    assert sum(size for _, _, size in asked) == TENSORS["a"].nbytes + TENSORS["b"].nbytes


def scribble(file: Path) -> None:
    header = b'{"a": 3, "b": {"data_offsets": ["x", 1]}}'
    file.write_bytes(len(header).to_bytes(8, "little") + header)


def refuse(*_: Any) -> None:
    raise OSError(22, "no advice is taken here")


HARMS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "file removed": lambda file, _: file.unlink(),
    "file damaged": lambda file, _: file.write_bytes(b"\xff" * 100),
    "header scribbled": lambda file, _: scribble(file),
    "advice refused": lambda _, patch: patch.setattr(os, "posix_fadvise", refuse, raising=False),
    "no advice": lambda _, patch: patch.delattr(os, "posix_fadvise", raising=False),
}


@pytest.mark.parametrize("harm", HARMS)
def test_never_fails_a_run(tmp_path, monkeypatch, harm):
    file = stored(tmp_path)
    source = SafetensorsExpert(tmp_path)
    HARMS[harm](file, monkeypatch)
    for _ in range(2):
        source.expect(list(TENSORS))


def test_nothing_is_opened_or_read_into_the_process(tmp_path):
    file = stored(tmp_path)
    source = SafetensorsExpert(tmp_path)
    source.expect(list(TENSORS))
    assert not is_open(file)
    assert torch.equal(source.tensor("a"), TENSORS["a"])


class Recorder:
    """A source that keeps what it was told to expect, and what was read."""

    def __init__(self, source: Any, events: list[tuple[str, str, set[str]]], model: str) -> None:
        self.source, self.events, self.model = source, events, model

    def names(self) -> set[str]:
        return self.source.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(name)

    def tensor(self, name: str) -> Tensor:
        self.events.append(("read", self.model, {name}))
        return self.source.tensor(name)

    def expect(self, names: Iterable[str]) -> None:
        self.events.append(("expect", self.model, set(names)))


BLOCK = torch.nn.ModuleDict({"attn": torch.nn.MultiheadAttention(4, 2)})
BLOCK["map"] = torch.nn.Linear(2, 3)
MODEL = torch.nn.ModuleDict({"block": BLOCK})
PARTS = ("q_proj.weight", "k_proj.weight", "v_proj.bias", "out_proj.weight")
WHOLE = ("in_proj_weight", "in_proj_bias", "out_proj.weight")
WRAPPERS: dict[str, tuple[Callable[[Any], Any], list[str], set[str]]] = {
    "watched": (WatchedSource, ["block.map.weight"], {"block.map.weight"}),
    "common rows": (lambda s: CommonRows(s, 3), ["block.map.bias"], {"block.map.bias"}),
    "slices": (
        lambda source: UnfusedSource(source, "attn"),
        [f"block.attn.{part}" for part in PARTS],
        {f"block.attn.{leaf}" for leaf in WHOLE},
    ),
    "part of a model": (
        lambda source: ExpertModel("task", source, BLOCK),
        ["map.weight"],
        {"block.map.weight"},
    ),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_wrappers_ask_under_the_sources_names_where_it_wants_to_know(kind):
    wrap, names, wanted = WRAPPERS[kind]
    events: list[Any] = []
    plain = InMemoryExpert(MODEL)
    wrap(plain).expect(names)
    wrap(Recorder(plain, events, "m")).expect(names)
    assert events == [("expect", "m", wanted)]


def test_lora_expects_the_base_and_its_own_two_matrices(asked, tmp_path):
    base, events = t5_model().float(), []
    source = LoraExpert(
        Recorder(InMemoryExpert(base), events, "base"), write_adapter(tmp_path / "a", base, 1)
    )
    name = next(name for name in source.names() if name.endswith("SelfAttention.q.weight"))
    source.expect([name, "shared.weight"])
    assert events == [("expect", "base", {name, "shared.weight"})]
    module = base.get_submodule(name.removesuffix(".weight"))
    wanted = 2 * (module.in_features + module.out_features) * 4  # type: ignore[operator]
    assert sum(size for _, _, size in asked) == wanted


@pytest.mark.parametrize("make", [clip_suite, t5_suite])
@pytest.mark.parametrize("more", [{}, {"mix_alpha": 0.0, "log_drift": False}], ids=str)
def test_every_visit_was_expected_during_the_one_before(make: Callable[[], Suite], more):
    suite, events = make(), []
    expected = run_fast(suite, **more).model.state_dict()
    for name, expert in suite.experts.items():
        suite.experts[name] = Recorder(InMemoryExpert(expert), events, name)  # type: ignore
    suite.base = Recorder(InMemoryExpert(suite.base), events, "base")  # type: ignore
    found = run_fast(suite, **more).model.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    told: dict[str, set[str]] = {}
    surprises, wasted = [], []
    for kind, model, names in events:
        if kind == "expect":
            wasted += [(model, name) for name in told.get(model, ())]
            told[model] = names
        elif names <= told.get(model, set()):
            told[model] -= names
        else:
            surprises += [model]
    # nothing comes before the first task's inputs, or first block where there are none to run
    assert set(surprises) <= {next(iter(suite.experts))}
    assert not wasted and not any(told.values())


def test_a_tensor_that_is_where_it_should_be_is_not_copied():
    tensor = torch.ones(3)
    assert copied_to(tensor, torch.device("cpu"), torch.float32) is tensor
    assert copied_to(tensor, torch.device("cpu"), torch.float64).dtype == torch.float64
    assert copied_to(tensor, torch.device("meta"), torch.float32).is_meta
