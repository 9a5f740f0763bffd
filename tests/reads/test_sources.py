"""Sources give what torch and PEFT's formula give, and every byte of an expert is counted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import merged_by_hand, write_adapter
from calibrations import Bare, assert_identical, run_fast
from safetensors.torch import load_file, save_file
from tiny_models import Suite, clip_suite, gpt2_suite, t5_model, t5_suite
from tiny_open_clip import tower_suite
from torch import nn
from variations import stored

from fusion_bench_featcal import CalibrationError, Paper, Plus, SafetensorsExpert
from fusion_bench_featcal.cli import main
from fusion_bench_featcal.experts import InMemoryExpert
from fusion_bench_featcal.experts.lora import LoraExpert
from fusion_bench_featcal.experts.reads import BASE, OUTSIDE
from fusion_bench_featcal.json_files import json_text
from fusion_bench_featcal.output.fingerprint import glimpse


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2,))


def run(suite: Suite, rule: Any = None, **more: Any) -> Any:
    return run_fast(suite, rule=Paper() if rule is None else rule, **more)


def test_what_is_neither_a_module_nor_a_source_is_named():
    suite = clip_suite(tasks=1)
    states: Any = {"task_0": suite.experts["task_0"].state_dict()}
    suite.experts = states
    with pytest.raises(CalibrationError, match=r"expert 'task_0': a OrderedDict is no model: give"):
        run(suite)


def test_files_give_what_load_file_gives(tmp_path: Path):
    model = t5_model().float()
    source = stored(model, tmp_path / "a")
    wanted = {k: v for f in tmp_path.rglob("*.safetensors") for k, v in load_file(f).items()}
    assert source.names() == set(wanted)
    for name, tensor in wanted.items():
        assert torch.equal(source.tensor(name), tensor)
        assert torch.equal(source.rows(name, 0, 2), tensor[:2])
        assert torch.equal(source.rows(name, 1, 3), tensor[1:3])
        assert (source.shape(name), source.nbytes(name)) == (tuple(tensor.shape), tensor.nbytes)


def test_every_shape_and_dtype_is_read(tmp_path: Path):
    tensors = {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "thin": torch.empty(3, 0)}
    for number, dtype in enumerate((torch.bool, torch.uint8, torch.int64, torch.bfloat16)):
        tensors[f"{number}"] = torch.arange(12).reshape(3, 2, 2).to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsExpert(tmp_path)
    for name, wanted in tensors.items():
        rows = wanted[1:9] if wanted.ndim else wanted
        for found, of_name in ((source.tensor(name), wanted), (source.rows(name, 1, 9), rows)):
            assert found.dtype == of_name.dtype and torch.equal(found, of_name)


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}])
def test_lora_reads_the_merged_expert_whole_or_by_rows(changes: Any, tmp_path: Path):
    adapter = write_adapter(tmp_path / "a", t5_model().float(), 1, **changes)
    source = LoraExpert(InMemoryExpert(t5_model().float()), adapter)
    scale = 6 / 2**0.5 if changes else 3.0
    for name, wanted in merged_by_hand(t5_model().float(), adapter, scale).state_dict().items():
        torch.testing.assert_close(source.tensor(name), wanted, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(source.rows(name, 1, 3), wanted[1:3], rtol=1e-6, atol=1e-7)
    other = write_adapter(tmp_path / "b", t5_model().float(), 2, **changes)
    assert glimpse(LoraExpert(InMemoryExpert(t5_model().float()), other)) != glimpse(source)


SUITES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "clip": (small_clip, Paper(), {}),
    "weights alone": (small_clip, Paper(mix_alpha=0.0), {"log_drift": False}),
    "plus": (small_clip, Plus(), {}),
    "gpt2": (gpt2_suite, Paper(), {"modules": ["h.1.*"]}),
    "open_clip": (tower_suite, Paper(), {}),
    "t5": (lambda: t5_suite(depths=(1, 1)), Paper(), {}),
}


@pytest.mark.parametrize("name", SUITES)
def test_experts_in_files_give_the_bits_of_experts_in_memory(name: str, tmp_path: Path):
    make, rule, more = SUITES[name]
    suite = make()
    wanted = run(suite, rule, **more)
    suite.experts = {t: stored(m, tmp_path / t) for t, m in suite.experts.items()}
    found = run(suite, rule, hashed=True, **more)
    assert_identical(found.model, wanted.model)
    for task, places in found.reads["experts"].items():
        in_memory = wanted.reads["experts"][task]
        assert {block: places[block] for block in suite.blocks} == {
            block: in_memory[block] for block in suite.blocks
        }
        assert places[OUTSIDE] <= in_memory[OUTSIDE]  # of tied tensors files have one
    models = found.reads["hashes"]["models"]
    assert set(models) <= {BASE, *suite.experts} and set(suite.experts) <= set(models)
    assert wanted.reads["hashes"] is None


@pytest.mark.parametrize("name", SUITES)
def test_count_of_a_full_read(name: str):
    make, rule, more = SUITES[name]
    suite = make()
    reads = run(suite, rule, **more).reads
    totals, plan = reads["totals"], reads["plan"]
    assert totals["experts_read"] == plan["full"] == plan["bytes"]
    assert (totals["merged_stood_in"], plan["limit"]) == (0, None)
    for places in reads["experts"].values():
        assert list(places) == [OUTSIDE, *suite.blocks]
        assert places[suite.blocks[-1]] > 0
        assert (places[OUTSIDE] == 0) == (name == "weights alone")
        assert sum(places.values()) * len(suite.experts) == totals["experts_read"]
    assert totals["base_read"] == sum(reads["base"].values()) > 0


class Overheard(InMemoryExpert):
    """Remembers the names of the tensors that were read."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.read: dict[str, int] = {}

    def tensor(self, name: str) -> torch.Tensor:
        self.read[name] = self.nbytes(name)
        return super().tensor(name)


@pytest.mark.parametrize("name", ["clip", "weights alone", "plus", "gpt2", "t5"])
@pytest.mark.parametrize("share", [0.1, 30, 60, 100])
def test_budgeted_run_is_the_run_with_merged_weights_in_the_experts(name: str, share: float):
    make, rule, more = SUITES[name]
    suite = make()
    whole, overheard = suite.experts, {t: Overheard(e) for t, e in suite.experts.items()}
    suite.experts = overheard
    found = run(suite, rule, expert_read_budget=f"{share}%", **more)
    plan = found.reads["plan"]
    read = sum(sum(source.read.values()) for source in overheard.values())
    assert read == found.reads["totals"]["experts_read"] == plan["bytes"] <= plan["limit"]
    assert plan["limit"] == int(plan["full"] * share) // 100
    assert any(plan["omitted"].values()) == (share < 100)
    suite.experts = {task: copy.deepcopy(expert) for task, expert in whole.items()}
    merged = suite.merged.state_dict()
    for task, modules in plan["omitted"].items():
        for key, value in suite.experts[task].state_dict().items():
            if key.rpartition(".")[0] in modules:
                value.copy_(merged[key])
    assert_identical(found.model, run(suite, rule, **more).model)


def test_count_of_reads_is_explained(tmp_path: Path, capsys: Any):
    suite = small_clip()
    reads = run(suite, hashed=True, expert_read_budget="60%").reads
    (tmp_path / "reads.json").write_text(json_text(reads))
    assert main(["explain", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "; budget 60%, in forward order; " in shown
    assert f"merged model: {reads['hashes']['merged'][:16]}" in shown
    assert "layers.1 (8 modules)" in shown


def test_a_larger_budget_reads_more_of_the_same_and_first_blocks_come_first():
    suite = small_clip()
    omitted = [
        run(suite, expert_read_budget=f"{share}%").reads["plan"]["omitted"]["task_0"]
        for share in (20, 50, 80)
    ]
    assert set(omitted[0]) > set(omitted[1]) > set(omitted[2])
    assert all(name.startswith(suite.blocks[-1]) for name in omitted[2])


def test_source_that_tells_no_sizes_is_counted_and_takes_no_budget():
    suite = small_clip()
    wanted = run(suite)
    suite.experts = {task: Bare(expert) for task, expert in suite.experts.items()}  # type: ignore
    found = run(suite)
    assert_identical(found.model, wanted.model)
    assert found.reads["plan"] is None
    assert found.reads["totals"]["experts_read"] == wanted.reads["totals"]["experts_read"]
    with pytest.raises(CalibrationError, match=r"'Bare' .* 'nbytes'.*method\.expert_read_budget"):
        run(suite, expert_read_budget="50%")
