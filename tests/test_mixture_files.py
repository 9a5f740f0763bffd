"""Mixtures in files with one tensor per routed expert, which transformers 5 joins on loading."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import assert_identical, run_fast
from model_types import model_named, suite_named
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from test_experts import tuned
from tiny_languages import NEEDS_RELEASE_5
from tiny_models import Suite
from torch import Tensor

from fusion_bench_featcal import CalibrationError, CalibrationResult, SafetensorsExpert
from fusion_bench_featcal.experts import ExpertSource, LazyModel, meta_copy
from fusion_bench_featcal.experts.budget import PartialSource
from fusion_bench_featcal.experts.conversion import ConvertedSource, converted
from fusion_bench_featcal.models.adapters import AdapterExpert
from fusion_bench_featcal.models.merging import MergedOnRead
from fusion_bench_featcal.models.model_files import ModelFiles
from fusion_bench_featcal.models.vocabulary import VocabularyRows

pytestmark = NEEDS_RELEASE_5
GATE_UP, DOWN = (f"model.layers.1.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
# Type -> names of the first slot's matrices in its files, none if they have joined ones.
TYPES: dict[str, list[str]] = {
    "qwen3_moe": ["experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"],
    "olmoe": ["experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"],
    "deepseek_v3": ["experts.0.gate_proj", "experts.0.up_proj", "experts.0.down_proj"],
    "mixtral": ["block_sparse_moe.experts.0.w1", "block_sparse_moe.experts.0.w3"],
    "gpt_oss": [],
    "granitemoe": [],
}
OTHERS, IN_CI = ("mixtral", "olmoe", "gpt_oss"), [pytest.mark.slow, pytest.mark.ci]


class Heard(SafetensorsExpert):
    """Notes the names of the tensors that are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[str] = []

    def tensor(self, name: str) -> Tensor:
        self.read.append(name)
        return super().tensor(name)


def saved(folder: Path, kind: str = "qwen3_moe", dtype: torch.dtype = torch.float32) -> Any:
    """A model that transformers has saved and loaded again."""
    model = model_named(kind).to(dtype)
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("kind", TYPES)
def test_files_are_read_as_transformers_loads_them_and_given_back_exactly(kind: str, tmp_path: Any):
    model, raw = saved(tmp_path, kind), load_file(tmp_path / "model.safetensors")
    assert all(any(part in name for name in raw) for part in TYPES[kind])
    lazy = LazyModel("an expert", SafetensorsExpert(tmp_path), model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(lazy.tensor(name), tensor), name
    assert lazy.bytes_read == {name: lazy.source.nbytes(name) for name in lazy.source.names()}
    assert sum(lazy.bytes_read.values()) == sum(tensor.nbytes for tensor in raw.values())
    if not TYPES[kind]:  # read by the names of the files
        assert not lazy.source.joined
        return
    view = lazy.source
    assert isinstance(view, ConvertedSource)
    back = view.split({name: view.tensor(name) for name in view.names()})
    assert back.keys() == raw.keys() == {*view.stored_names(view.names())}
    assert all(torch.equal(back[name], tensor) for name, tensor in raw.items())
    assert converted(view, model) is view and view.digest == SafetensorsExpert(tmp_path).digest


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_slot_is_read_alone_and_counted_once(kind: str, tmp_path: Path):
    model, source = saved(tmp_path, kind, torch.bfloat16), Heard(tmp_path)
    lazy = LazyModel("an expert", source, model.float())
    whole = lazy.source.nbytes(GATE_UP)
    for number in (2, 0, 2):
        tensor = lazy.slot(GATE_UP, number)
        assert tensor.dtype == torch.float32 and tensor.data_ptr() % 64 == 0
        assert torch.equal(tensor, model.get_parameter(GATE_UP)[number])
    assert {name.split(".")[-3] for name in source.read} == (
        {"0", "2"} if lazy.source.joined else set()
    )
    count = len(model.get_parameter(GATE_UP))
    assert lazy.bytes_read == {GATE_UP: 2 * whole // count}
    lazy.tensor(GATE_UP)
    lazy.slot(GATE_UP, 1)
    lazy.slot(DOWN, 3)
    assert lazy.bytes_read == {GATE_UP: whole, DOWN: lazy.source.nbytes(DOWN) // count}


def test_slots_that_cannot_be_used_are_refused_by_name(tmp_path: Path):
    model, file = saved(tmp_path), tmp_path / "model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.experts.2.up_proj.weight"
    tensors[name][0, 0] = torch.inf
    save_file(tensors, file)
    lazy = LazyModel("an expert", SafetensorsExpert(tmp_path), model)
    assert torch.equal(lazy.slot(GATE_UP, 1), model.get_parameter(GATE_UP)[1])
    with pytest.raises(CalibrationError, match=rf"an expert: tensor '{GATE_UP}' has NaN or infin"):
        lazy.slot(GATE_UP, 2)
    save_file({n: t for n, t in tensors.items() if n != name}, file)
    with pytest.raises(CalibrationError, match=rf"an expert.*tensor '{GATE_UP}'.*Check its files"):
        LazyModel("an expert", SafetensorsExpert(tmp_path), model)
    assert ModelFiles(tmp_path, "--expert")._fitting(model) is None


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_views_of_files_read_one_slot_alone(tmp_path: Path):
    model, source = saved(tmp_path / "base"), Heard(tmp_path / "base")
    tuned(tmp_path / "adapter", copy.deepcopy(model), LoraConfig(target_modules=["q_proj"]))
    lazy = LazyModel("a model", source, model)
    other = converted(SafetensorsExpert(tmp_path / "base"), model)
    views: list[ExpertSource] = [
        AdapterExpert(lazy.source, model, tmp_path / "adapter"),
        PartialSource(other, lazy.source, {GATE_UP: GATE_UP}),
        MergedOnRead(lazy, lazy, [lazy], 0.5),
        VocabularyRows(lazy.source, 3),
    ]
    for view in views:
        source.read.clear()
        assert torch.equal(view.rows(GATE_UP, 2, 3)[0], model.get_parameter(GATE_UP)[2])
        assert {name.split(".")[-3] for name in source.read} == {"2"}
        assert view.joined.keys() == {name for name in model.state_dict() if "experts" in name}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_of_routed_experts_are_merged_from_files(tmp_path: Path):
    model = saved(tmp_path / "base")
    parameters = [name.removeprefix("model.layers.1.") for name in (GATE_UP, DOWN)]
    config = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=parameters)
    merged = tuned(tmp_path / "adapter", copy.deepcopy(model), config)
    files = ModelFiles(tmp_path / "base", "--base")
    expert = LazyModel("a", ModelFiles(tmp_path / "adapter", "--expert").source(files), model)
    assert expert.source.joined
    for name, tensor in merged.items():
        torch.testing.assert_close(expert.tensor(name).double(), tensor, rtol=1e-5, atol=1e-6)
    assert torch.equal(expert.slot(GATE_UP, 1), expert.tensor(GATE_UP)[1])


def in_files(suite: Suite, folder: Path) -> Suite:
    """The suite with base and experts in files."""
    for name, model in {"base": suite.base, "merged": suite.merged, **suite.experts}.items():
        model.save_pretrained(folder / name)  # type: ignore[operator]
    experts: Any = {task: SafetensorsExpert(folder / task) for task in suite.experts}
    return replace(suite, base=SafetensorsExpert(folder / "base"), experts=experts)  # type: ignore[arg-type]


def loaded(folder: Path, like: Any) -> Any:
    """The model in a folder of finished blocks, as transformers loads it."""
    like.config.save_pretrained(folder)
    model, info = type(like).from_pretrained(folder, dtype=like.dtype, output_loading_info=True)
    assert not any(info.values())
    return model


@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(k, marks=IN_CI) for k in OTHERS)])
def test_a_mixture_in_files_is_calibrated_to_the_bits_of_one_in_memory(kind: str, tmp_path: Path):
    suite = suite_named(kind)
    expected = run_fast(suite, checkpoint_dir=tmp_path / "memory").model
    assert_identical(loaded(tmp_path / "memory", suite.merged), expected)
    streamed = in_files(suite, tmp_path)
    assert_identical(run_fast(streamed).model, expected)
    weights, folder = SafetensorsExpert(tmp_path / "merged"), tmp_path / "out"
    streamed = replace(streamed, merged=meta_copy(suite.merged))

    def run() -> CalibrationResult:
        options: Any = {"merged_weights": weights, "checkpoint_dir": folder, "resume": True}
        return run_fast(streamed, **options)

    result = run()
    assert result.weights is not None and result.weights.names() == weights.names()
    assert_identical(loaded(folder, suite.merged), expected)
    for file in ("block-0001.safetensors", "config.json"):  # as if it had been killed
        (folder / file).unlink()
    assert run().log.select("resumed")[0]["blocks"] == 1
    assert_identical(loaded(folder, suite.merged), expected)
