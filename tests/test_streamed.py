"""Models larger than memory: read block by block, merged on read, and errors if memory runs out."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from safetensors.torch import save_model
from tiny_convs import tower_suite
from tiny_models import Suite, clip_suite, t5_suite
from torch import nn

from fusion_bench_featcal import CalibrationError, InMemoryExpert, Paper, Plus, SafetensorsExpert
from fusion_bench_featcal.experts import LazyModel, meta_copy
from fusion_bench_featcal.models import merging
from fusion_bench_featcal.streams.streams import Streams

CASES: dict[str, tuple[Callable[[], Suite], Any]] = {  # a suite and a rule
    "clip": (lambda: clip_suite(tasks=2), Plus()),
    "resnet": (lambda: tower_suite("resnet"), Paper()),
    "t5": (lambda: t5_suite(depths=(1, 1)), Paper()),
}


def on_disk(suite: Suite, folder: Path) -> tuple[Suite, SafetensorsExpert]:
    """The suite with the structure of its merged model, whose weights are in a file."""
    save_model(suite.merged, str(folder / "merged.safetensors"))
    structure = meta_copy(suite.merged)
    return replace(suite, merged=structure), SafetensorsExpert(folder / "merged.safetensors")


def calibrated(suite: Suite, folder: Path, **more: Any) -> nn.Module:
    """The model that a calibration from files leaves in its folder."""
    streamed, weights = on_disk(suite, folder)
    result = run_fast(streamed, merged_weights=weights, checkpoint_dir=folder / "out", **more)
    assert result.weights is not None and all(p.is_meta for p in result.model.parameters())
    model = copy.deepcopy(suite.merged)
    for tensor in model.state_dict().values():
        tensor.zero_()
    model.load_state_dict(
        result.weights.memory_mapped(), strict=False
    )  # tied tensors are there once
    return model


@contextmanager
def tensors_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Names of parameters outside a block that models have in memory while it runs."""
    names: set[str] = set()
    step = Streams.step

    def noted(self: Streams, model: nn.Module, block: str, call: Any) -> Any:
        outside = (n for n, p in model.named_parameters() if not p.is_meta)
        names.update(name for name in outside if not name.startswith(f"{block}."))
        return step(self, model, block, call)

    with monkeypatch.context() as patch:
        patch.setattr(Streams, "step", noted)
        yield names


@pytest.mark.parametrize("name", CASES)
def test_a_model_in_files_is_calibrated_block_by_block_to_the_same_bits(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    make, rule = CASES[name]
    suite = make()
    with tensors_in_memory(monkeypatch) as names:
        expected = run_fast(suite, rule=rule).model
        assert_identical(calibrated(suite, tmp_path, rule=rule), expected)
    assert names == set() or name == "resnet"


def test_a_model_in_files_needs_a_folder_and_finite_values(tmp_path: Path):
    suite = clip_suite()
    name = next(n for n, _ in suite.merged.named_parameters() if n.endswith("1.mlp.fc1.weight"))
    suite.merged.get_parameter(name).data[0, 0] = torch.nan
    streamed, weights = on_disk(suite, tmp_path)
    with pytest.raises(ValueError, match="merged_weights needs checkpoint_dir"):
        run_fast(streamed, merged_weights=weights)
    with pytest.raises(CalibrationError, match=rf"the merged model: tensor '{name}' has NaN"):
        run_fast(streamed, merged_weights=weights, checkpoint_dir=tmp_path / "out")


@pytest.mark.parametrize("scale", [0.3, None])
def test_merging_on_read_equals_merging_whole_tensors(scale: float | None, monkeypatch: Any):
    suite = clip_suite(tasks=3)
    monkeypatch.setattr(merging, "ENTRIES", 50)  # tensors are read piece by piece
    models = {"base": suite.base, **suite.experts}
    read = [LazyModel(f"model {n!r}", InMemoryExpert(m), suite.base) for n, m in models.items()]
    merged = merging.MergedOnRead(read[0], read[0], read[1:], scale)
    for name, base in suite.base.state_dict().items():
        tensors = [expert.state_dict()[name].float() for expert in suite.experts.values()]
        expected = torch.stack(tensors).mean(0)
        if scale is not None:
            expected = base.float() + scale * sum(tensor - base.float() for tensor in tensors)
        expected = expected.to(base.dtype) if base.is_floating_point() else base
        assert torch.equal(merged.tensor(name), expected)
    name, tensor = list(suite.experts["task_1"].named_parameters())[-1]
    tensor.data.view(-1)[0] = torch.inf
    with pytest.raises(CalibrationError, match=rf"model 'task_1': tensor '{name}' has NaN"):
        merged.tensor(name)


def test_where_memory_ran_out_is_named_and_finished_blocks_stay(tmp_path: Path):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    suite, runs = clip_suite(tasks=2), list[int]()

    def fail(_: Any, args: tuple[Any, ...]) -> None:
        runs.append(1)
        if len(runs) > 1 and not args[0].is_meta:  # not when the family is checked
            raise error

    module = suite.merged.get_submodule(f"{suite.blocks[1]}.mlp.fc1")
    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(CalibrationError) as raised:
        run_fast(suite, checkpoint_dir=tmp_path)
    assert raised.value.__cause__ is error
    for words in (f"out of memory (cpu) at {suite.blocks[1]} · task_0", "activations=host",
                  "batch_size", "modules"):  # fmt: skip
        assert words in str(raised.value)
    assert not list(tmp_path.glob("*.part"))
    handle.remove()
    resumed = run_fast(suite, checkpoint_dir=tmp_path, resume=True)
    assert resumed.log.select("resumed")[0]["blocks"] == 1


class Threads(InMemoryExpert):
    """Remembers which tensors were read in another thread than the calibration's."""

    reads_in_threads = True

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.ahead = list[str]()

    def tensor(self, name: str) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            self.ahead.append(name)
        return super().tensor(name)


@pytest.mark.parametrize("rule", [Paper(), Plus()], ids=["paper", "plus"])
def test_the_next_block_is_read_while_one_runs(rule: Any) -> None:
    suite = clip_suite(tasks=2)
    experts: Any = {task: Threads(expert) for task, expert in suite.experts.items()}
    result = run_fast(replace(suite, experts=experts), rule=rule)
    assert_identical(result.model, run_fast(suite, rule=rule).model)
    in_blocks = {n for n in suite.merged.state_dict() if n.startswith(tuple(suite.blocks))}
    # Nothing runs before the first expert's first block.
    assert {n for n in in_blocks if not n.startswith(suite.blocks[0])} <= {*experts["task_0"].ahead}
    assert in_blocks <= {*experts["task_1"].ahead}


def test_a_tensor_that_cannot_be_read_ahead_is_named() -> None:
    class Broken(Threads):
        def tensor(self, name: str) -> torch.Tensor:
            tensor = super().tensor(name)
            return tensor * torch.nan if name in self.ahead else tensor

    suite = clip_suite(tasks=2)
    experts: Any = {task: Broken(expert) for task, expert in suite.experts.items()}
    with pytest.raises(CalibrationError, match=r"experts\['task_1'\].*layers\.0.*NaN"):
        run_fast(replace(suite, experts=experts), rule=Paper())
