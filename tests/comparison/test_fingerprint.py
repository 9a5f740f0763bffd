"""A fingerprint changes with everything that a result depends on, and with nothing else."""

from pathlib import Path
from typing import Any

import torch
from comparison_parts import linear, model_pool
from fusion_bench import BaseModelPool
from omegaconf import OmegaConf

from fusion_bench_featcal.comparison.fingerprint import (
    describe,
    describe_pool,
    describe_software,
    fingerprint,
)


def test_order_of_keys_does_not_count_but_values_do() -> None:
    known = fingerprint({"a": 1, "b": [1, 2]})
    assert fingerprint({"b": [1, 2], "a": 1}) == known
    assert fingerprint(OmegaConf.create({"a": 1, "b": [1, 2]})) == known
    assert fingerprint({"a": 1, "b": [2, 1]}) != known
    assert fingerprint({"a": 1.5, "b": [1, 2]}) != known
    assert fingerprint({"a": True, "b": [1, 2]}) != known


def test_interpolations_count_with_their_values() -> None:
    config = OmegaConf.create({"seed": 3, "cell": {"seed": "${seed}"}})
    assert describe(config.cell) == {"seed": 3}


def test_weights_in_memory_count() -> None:
    model = linear(1)
    known = fingerprint(model)
    assert fingerprint(linear(1)) == known
    assert fingerprint(linear(1).half()) != known
    torch.nn.init.zeros_(model[0].bias)  # type: ignore[index]
    assert fingerprint(model) != known


def test_pool_in_memory_counts_with_its_weights() -> None:
    known = fingerprint(describe_pool(model_pool()))
    assert fingerprint(describe_pool(model_pool())) == known
    pool: Any = model_pool()
    torch.nn.init.zeros_(pool._models["right"][0].bias)
    assert fingerprint(describe_pool(pool)) != known


def test_changed_model_file_counts(tmp_path: Path) -> None:
    def pool() -> Any:
        return BaseModelPool(OmegaConf.create({"expert": str(tmp_path)}))

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    known = fingerprint(describe_pool(pool()))
    assert fingerprint(describe_pool(pool())) == known
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert fingerprint(describe_pool(pool())) != known


def test_objects_count_with_class_and_length() -> None:
    class Rows(list):
        pass

    class Other:
        pass

    assert describe(Other())["length"] is None
    assert fingerprint(Other()) != fingerprint(object())
    assert describe(Rows([1])) == [1]


def test_software_is_described_once_and_plainly() -> None:
    software = describe_software()
    assert set(software) == {"fusion-bench", "torch", "transformers", "code"}
    assert software is describe_software()
