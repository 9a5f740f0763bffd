import platform
import sys
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from fusion_bench_featcal.compare import UNAVAILABLE, describe_device, environment, versions


def test_versions_are_those_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "PACKAGES", ("numpy", "no-such-distribution"))
    assert versions() == {
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "no-such-distribution": "not installed",
    }


def test_versions_name_what_decides_numbers():
    named = {"python", "torch", "transformers", "fusion-bench", "lightning", "fusion-bench-featcal"}
    assert named <= set(versions())


def test_the_cpu_is_described():
    found = describe_device("cpu")
    assert found["device"] == "cpu"
    assert found["accelerator"] == "none"
    assert found["cpu"]
    assert found["cpu_cores"] >= 1


def test_an_accelerator_is_named_by_the_driver(monkeypatch: pytest.MonkeyPatch):
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda device: "Abacus 9")
    torch = SimpleNamespace(cuda=cuda, get_num_threads=lambda: 3)
    monkeypatch.setitem(sys.modules, "torch", torch)
    found = describe_device("cuda:1")
    assert (found["accelerator"], found["torch_threads"]) == ("Abacus 9", 3)


def test_an_unknown_accelerator_is_unavailable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = describe_device("mps")
    assert found["accelerator"] == found["torch_threads"] == UNAVAILABLE
