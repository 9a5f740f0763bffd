"""Every byte that is read is in the ledger, and no source counts otherwise than it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, Bare, Overheard, assert_identical, replay, run_fast
from safetensors.torch import save_file
from tiny_models import Suite, clip_suite, gpt2_suite, t5_suite
from tiny_open_clip import tower_suite

from fusion_bench_featcal import InMemoryExpert, SafetensorsExpert
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.families.unfused import UnfusedSource


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2,))


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (small_clip, {}),
    "clip, anchor without base": (small_clip, {"anchor_rho": 1.0}),
    "clip, no features": (small_clip, {"mix_alpha": 0.0, "log_drift": False}),
    "clip, plus": (small_clip, PLUS),
    "t5, plus": (lambda: t5_suite(depths=(1, 1)), PLUS),
    "replay": (small_clip, {"family": replay(clip_suite())}),
    "gpt2": (gpt2_suite, {"modules": ["h.1.*"]}),
    "open_clip": (tower_suite, {}),
    "t5": (lambda: t5_suite(depths=(1, 1)), {}),
    "t5, no features": (lambda: t5_suite(depths=(1, 1)), {"mix_alpha": 0.0, "log_drift": False}),
}


@pytest.mark.parametrize("name", SUITES)
def test_what_was_planned_is_what_was_read(name: str):
    make, more = SUITES[name]
    suite = make()
    result = run_fast(suite, **more)
    found = result.reads
    for task, places in found["experts"].items():
        assert sum(place["read"] for place in places.values()) > 0, task
        for place, entry in places.items():
            assert entry["planned"] == entry["read"], (task, place)
    for place, entry in found["base"].items():
        assert entry["planned"] == entry["read"], place
    totals = found["totals"]
    assert totals["experts_read"] == totals["experts_planned"] == found["plan"]["full"]
    assert totals["merged_stood_in"] == 0
    if more.get("anchor_rho") == 1.0:
        assert totals["base_read"] == 0
    elif more.get("ridge") == "kfold":  # weights only
        modules = {r["module"] for r in result.log.of_kind("module") if "lambdas" in r}
        weights = [suite.merged.get_parameter(f"{name}.weight") for name in modules]
        assert totals["base_read"] == sum(weight.nbytes for weight in weights)
    else:
        assert totals["base_read"] >= totals["output"]


def test_ledger_has_what_the_sources_gave():
    suite = small_clip()
    sources = {task: Overheard(expert) for task, expert in suite.experts.items()}
    suite.experts = dict(sources)  # type: ignore[arg-type]
    found = run_fast(suite).reads
    for task, source in sources.items():
        assert len(set(source.read)) == len(source.read)  # each tensor is read once
        read = sum(place["read"] for place in found["experts"][task].values())
        assert read == sum(map(source.nbytes, source.read))


@pytest.mark.parametrize("modules", [None, ["fc1", "self_attn.*"]])
@pytest.mark.parametrize("bias", [True, False])
def test_without_features_only_calibrated_parameters_are_read(modules: Any, bias: bool):
    suite = small_clip()
    source = Overheard(suite.experts["task_1"])
    suite.experts["task_1"] = source  # type: ignore[assignment]
    calm = {"mix_alpha": 0.0, "log_drift": False, "modules": modules, "calibrate_bias": bias}
    model = run_fast(suite, **calm).model
    before, after = suite.merged.state_dict(), model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert set(source.read) == changed
    assert len(source.read) == len(changed)


def test_source_that_tells_no_sizes_is_counted_as_it_reads():
    suite = small_clip()
    wanted = run_fast(suite)
    suite.experts = {task: Bare(expert) for task, expert in suite.experts.items()}  # type: ignore[misc]
    found = run_fast(suite)
    assert_identical(found.model, wanted.model)
    assert found.reads["plan"] is None
    assert found.reads["totals"]["experts_read"] == wanted.reads["totals"]["experts_read"]


def test_sizes_of_stored_tensors(tmp_path: Path):
    tensors = {
        "double": torch.zeros(3, 5, dtype=torch.float64),
        "half": torch.zeros(3, 5, dtype=torch.float16),
        "brain": torch.zeros(7, dtype=torch.bfloat16),
        "whole": torch.zeros(2, 2, dtype=torch.int64),
        "byte": torch.zeros(9, dtype=torch.uint8),
        "flags": torch.zeros(11, dtype=torch.bool),
        "scalar": torch.zeros((), dtype=torch.float32),
        "none": torch.zeros(0, 4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsExpert(tmp_path)
    for name, tensor in tensors.items():
        assert source.nbytes(name) == tensor.numel() * tensor.element_size(), name


def test_sizes_of_common_rows_and_of_slices():
    model = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(10, 4)})
    cut = CommonRows(InMemoryExpert(model), 7)
    assert cut.nbytes("embed_tokens.weight") == 7 * 4 * 4
    suite = tower_suite()
    whole = InMemoryExpert(suite.merged)
    sliced = UnfusedSource(whole, "attn")
    fused = next(name for name in whole.names() if name.endswith("in_proj_weight"))
    for part in ("q_proj", "k_proj", "v_proj"):
        name = fused.replace("in_proj_weight", f"{part}.weight")
        assert 3 * sliced.nbytes(name) == whole.nbytes(fused) == sliced.nbytes(fused)


def test_lora_expert_reads_base_and_adapter(tmp_path: Path):
    from test_experts_lora import write_adapter
    from tiny_models import t5_model

    base = InMemoryExpert(t5_model().float())
    source = LoraExpert(base, write_adapter(tmp_path / "a", t5_model().float(), 1))
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    outputs, inputs = source.shape(name)
    assert source.nbytes(name) == base.nbytes(name) + 2 * (inputs + outputs) * 4
    other = "encoder.block.0.layer.0.SelfAttention.k.weight"
    assert source.nbytes(other) == base.nbytes(other)
