"""Mixtures of experts: routers and their experts stay as merged, all other modules are solved."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, assert_identical, assert_same, run_fast, run_slow, samples_in
from model_types import MIXTURES, Row
from moe_oracle import find_mixture, matrix
from tiny_models import Suite

from fusion_bench_featcal import SafetensorsExpert
from fusion_bench_featcal.lab.rivals import RegMean

BLOCK = "model.layers.0"
kinds = pytest.mark.parametrize("row", MIXTURES, ids=lambda row: row.name)


def suite_of(row: Row) -> Suite:
    suite = row.suite()
    assert suite is not None
    return suite


@kinds
@pytest.mark.parametrize("rule", ["paper", "plus"])
def test_experts_stay_as_merged(row: Row, rule: str, caplog: pytest.LogCaptureFixture) -> None:
    suite = suite_of(row)
    found = run_fast(suite, **(PLUS if rule == "plus" else {})).model
    for name, value in found.named_parameters():
        routed = ".experts." in name or name.endswith((".gate.weight", "embed_tokens.weight"))
        if routed:
            assert torch.equal(value, suite.merged.get_parameter(name)), name
    name = "model.layers.1.self_attn.o_proj.weight"
    assert not torch.equal(found.get_parameter(name), suite.merged.get_parameter(name))
    assert "the experts of 2 mixtures stay as merged" in caplog.text
    if rule == "paper":
        assert_same(found, run_slow(suite, PAPER).model)


@kinds
def test_experts_are_read_from_files_by_the_names_they_have_there(row: Row, tmp_path: Path) -> None:
    suite = suite_of(row)
    wanted = run_fast(suite).model
    files = {}
    models: dict[str, Any] = {"base": suite.base, **suite.experts}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        files[name] = SafetensorsExpert(tmp_path / name)
        assert any(".experts.3." in stored for stored in files[name].names())
    from_files: Any = replace(suite, base=files.pop("base"), experts=files)
    assert_identical(run_fast(from_files).model, wanted)


def test_least_squares_leaves_experts_at_their_mean() -> None:
    suite = suite_of(MIXTURES[0])
    method = RegMean(samples_per_task=samples_in(suite), family=suite.family)
    found = method.merge_models(suite.base, suite.experts, suite.inputs)
    mixture = find_mixture(suite.base, BLOCK)
    first, second = (matrix(expert, mixture, 1, "up") for expert in suite.experts.values())
    torch.testing.assert_close(matrix(found, mixture, 1, "up"), (first + second) / 2)
