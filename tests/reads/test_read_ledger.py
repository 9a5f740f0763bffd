"""Only what is needed is read, once, and no source counts otherwise than it reads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Overheard, run_fast
from safetensors.torch import save_file
from tiny_models import Suite, clip_suite
from tiny_open_clip import tower_suite

from fusion_bench_featcal import FeatCalSettings, InMemoryExpert, SafetensorsExpert
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.vocabulary import CommonRows
from fusion_bench_featcal.families.unfused import UnfusedSource
from fusion_bench_featcal.read_budgets import budget_in_bytes


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2,))


def test_ledger_has_what_the_sources_gave():
    suite = small_clip()
    sources = {task: Overheard(expert) for task, expert in suite.experts.items()}
    suite.experts = dict(sources)  # type: ignore[arg-type]
    found = run_fast(suite).reads
    for task, source in sources.items():
        assert len(set(source.read)) == len(source.read)  # each tensor is read once
        assert sum(found["experts"][task].values()) == sum(map(source.nbytes, source.read))


@pytest.mark.parametrize("modules", [None, ["fc1", "self_attn.*"]])
def test_without_features_only_calibrated_parameters_are_read(modules: Any):
    suite = small_clip()
    source = Overheard(suite.experts["task_1"])
    suite.experts["task_1"] = source  # type: ignore[assignment]
    calm = {"mix_alpha": 0.0, "log_drift": False, "modules": modules}
    model = run_fast(suite, **calm).model
    before, after = suite.merged.state_dict(), model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert set(source.read) == changed
    assert len(source.read) == len(changed)


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


def test_experts_that_are_loaded_whole_keep_no_budget():
    with pytest.raises(ValueError, match=r"expert_read_budget needs.*method\.stream_experts=false"):
        FeatCalSettings(expert_read_budget="50%", stream_experts=False)


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (700, 700), (7e2, 700), ("700B", 700), ("2KB", 2000), ("2 KiB", 2048), ("1.5MB", 1500000),
        ("0.1GiB", 107374182), ("3TB", 3 * 10**12), ("50%", 500), ("33.3%", 333), ("100%", 1001),
    ],
)  # fmt: skip
def test_budget_in_bytes(budget: Any, wanted: int):
    kept: Any = FeatCalSettings(expert_read_budget=budget).expert_read_budget
    assert budget_in_bytes(kept, 1001) == wanted
