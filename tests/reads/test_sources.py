"""Sources give tensors as torch does, and each byte that is read of an expert is counted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import Overheard, assert_identical, run_fast
from safetensors.torch import load_file, save_file
from tiny_models import Suite, clip_suite, t5_model, t5_suite
from variations import stored

from fusion_bench_featcal import CalibrationError, FeatCalSettings, Paper, Plus, SafetensorsExpert
from fusion_bench_featcal.experts import ExpertSource
from fusion_bench_featcal.experts.budget import granted
from fusion_bench_featcal.settings.budgets import budget_in_bytes


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2,))


def test_files_give_the_tensors_and_sizes_of_load_file(tmp_path: Path):
    stored(t5_model().float(), tmp_path / "t5")
    more = {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "thin": torch.empty(3, 0)}
    for number, dtype in enumerate(
        (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64)
    ):
        more[f"{number}"] = torch.arange(12).reshape(3, 2, 2).to(dtype)
    (tmp_path / "more").mkdir()
    save_file(more, tmp_path / "more" / "model.safetensors")
    for folder in (tmp_path / "t5", tmp_path / "more"):
        tensors = {}
        for file in folder.rglob("*.safetensors"):
            tensors |= load_file(file)
        source = SafetensorsExpert(folder)
        assert source.names() == set(tensors)
        for name, tensor in tensors.items():
            sizes = source.shape(name), source.nbytes(name)
            assert sizes == (tuple(tensor.shape), tensor.nbytes)
            whole = source.tensor(name)
            assert whole.dtype == tensor.dtype and torch.equal(whole, tensor)
            for start, stop in ((0, 2), (1, 3), (1, 9)) if tensor.ndim else ():
                assert torch.equal(source.rows(name, start, stop), tensor[start:stop])


SUITES: dict[str, tuple[Any, Any]] = {
    "weights alone": (small_clip, Paper(mix_alpha=0.0)),
    "plus": (small_clip, Plus()),
    "t5": (lambda: t5_suite(depths=(1, 1)), Paper()),
}


@pytest.mark.parametrize("name", SUITES)
def test_experts_in_files_and_in_memory_give_the_same_bits_and_counts(name: str, tmp_path: Path):
    make, rule = SUITES[name]
    suite = make()
    in_memory = run_fast(suite, rule=rule)
    reads = in_memory.reads
    assert sum(reads["experts"].values()) == reads["plan"]["full"] == reads["plan"]["bytes"]
    assert (reads["plan"]["not_read"], reads["plan"]["limit"]) == ({}, None)
    assert reads["base"] > 0
    suite.experts = {t: stored(m, tmp_path / t) for t, m in suite.experts.items()}
    in_files = run_fast(suite, rule=rule)
    assert_identical(in_files.model, in_memory.model)
    for task, read in in_files.reads["experts"].items():
        assert 0 < read <= reads["experts"][task]  # files have tied tensors once


@pytest.mark.parametrize(
    ("name", "share"), [("weights alone", 30), ("plus", 60), ("t5", 10), ("t5", 100)]
)
def test_a_run_with_a_budget_is_the_run_with_merged_weights_in_the_experts(name: str, share: int):
    make, rule = SUITES[name]
    suite = make()
    whole, overheard = suite.experts, {t: Overheard(e) for t, e in suite.experts.items()}
    suite.experts = overheard
    result = run_fast(suite, rule=rule, expert_read_budget=f"{share}%")
    plan = result.reads["plan"]
    read = sum(s.nbytes(tensor) for s in overheard.values() for tensor in set(s.read))
    assert read == sum(result.reads["experts"].values()) == plan["bytes"] <= plan["limit"]
    assert plan["limit"] == plan["full"] * share // 100
    assert bool(plan["not_read"]) == (share < 100)
    suite.experts = {task: copy.deepcopy(expert) for task, expert in whole.items()}
    merged = suite.merged.state_dict()
    for task, modules in plan["not_read"].items():
        for key, value in suite.experts[task].state_dict().items():
            if key.rpartition(".")[0] in modules:
                value.copy_(merged[key])
    assert_identical(result.model, run_fast(suite, rule=rule).model)


def test_a_larger_budget_reads_more_of_the_same_from_the_first_block_on():
    suite = small_clip()
    reads = [run_fast(suite, expert_read_budget=f"{n}%").reads for n in (20, 50, 80)]
    skipped = [manifest["plan"]["not_read"]["task_0"] for manifest in reads]
    assert set(skipped[0]) > set(skipped[1]) > set(skipped[2])
    assert all(name.startswith(suite.blocks[-1]) for name in skipped[2])
    sizes = {"one": {"a.weight": ("a", 4), "b.weight": ("b", 5), "c.weight": ("c", 1)}}
    assert granted(5, sizes).omitted == {"one": ["b.weight", "c.weight"]}  # although c would fit
    with pytest.raises(CalibrationError, match="expert_read_budget=1 is less than one module"):
        run_fast(suite, expert_read_budget=1)


class Own(ExpertSource):
    """A source with only what it must define."""

    def __init__(self, module: Any) -> None:
        self.tensors = module.state_dict()

    def names(self) -> set[str]:
        return {*self.tensors}

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def test_sources_of_users_are_counted_by_their_tensors():
    suite: Any = small_clip()
    expected = run_fast(suite).reads
    suite.experts = {task: Own(expert) for task, expert in suite.experts.items()}
    assert run_fast(suite).reads == expected


@pytest.mark.parametrize(
    ("budget", "size"),
    [
        (7e2, 700), ("2KB", 2000), ("2 KiB", 2048), ("0.1GiB", 107374182), ("33.3%", 333),
        ("100%", 1001),
    ],
)  # fmt: skip
def test_amounts_and_shares_of_a_budget_in_bytes(budget: Any, size: int):
    accepted: Any = FeatCalSettings(expert_read_budget=budget).expert_read_budget
    assert budget_in_bytes(accepted, 1001) == size
