"""The method without the command: pools in Python, and what it refuses before any work."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fusion_bench import BaseModelPool
from fusion_bench.modelpool import CLIPVisionModelPool
from image_pools import AVERAGE, suite_pool
from tiny_models import clip_suite
from transformers import CLIPVisionModel

from fusion_bench_featcal import CalibrationError, FeatCalSettings
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.fusionbench.options import checked_choices, method_name
from fusion_bench_featcal.lab.rivals import FeatCal
from fusion_bench_featcal.method_inputs import MethodInputs
from fusion_bench_featcal.suites import image


def pool_of(models: dict[str, Any]) -> BaseModelPool:
    return BaseModelPool(models)


def memory_pool(seed: int = 3) -> Any:
    suite = clip_suite(seed=seed)
    models = {"_pretrained_": suite.base, "_merged_": suite.merged, **suite.experts}
    return pool_of({name: model.float() for name, model in models.items()})


def test_pool_without_merged_model_needs_a_merger() -> None:
    pool = memory_pool()
    del pool._models["_merged_"]
    with pytest.raises(CalibrationError, match=r"modelpool\.models\._merged_"):
        FeatCalAlgorithm(base_method=None).run(pool)


def test_missing_model_folder_is_named(tmp_path: Path) -> None:
    pool = pool_of({"_pretrained_": str(tmp_path / "nowhere")})
    with pytest.raises(CalibrationError, match=r"modelpool\.models\._pretrained_=.*nowhere: "):
        FeatCalAlgorithm(base_method=AVERAGE).run(pool)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ridge_lamda": 0.1}, r"method\.ridge_lamda .* 'ridge_lambda'"),
        ({"ridge_lambda": -1, "mix_alpha": 2}, r"method\.ridge_lambda .*; method\.mix_alpha"),
        ({"family": "bert"}, r"method\.family must be auto, clip"),
        (
            {"compare_with": ["expert"]},
            "method.compare_with must be null or a list of base, experts, merged, got ",
        ),
        ({"compare_with": 5}, "method.compare_with must be null or a list of .*got 5"),
        ({"base_method": "simple_average"}, r"method@method\.base_method=task_arithmetic"),
        ({"presets": ["a"]}, r"method\.presets must be null or a mapping of names to settings"),
        ({"presets": {"a": None}}, r"method\.presets must be a mapping of names to settings"),
        ({"presets": {"a/b": {}}}, r"method\.presets: 'a/b' cannot name a file"),
        ({"presets": {"a": {}, "A": {}}}, r"method\.presets: .*'A' differs from 'a' only in case"),
        ({"presets": {"weak": {"lambda": 1}}}, r"method\.presets\.weak\.lambda.*ridge_lambda"),
        ({"presets": {"weak": {"mix_alpha": 7}}}, r"method\.presets\.weak\.mix_alpha must be"),
        (
            {"presets": {"weak": {"checkpoint_dir": "elsewhere"}}},
            r"presets\.weak\.checkpoint_dir.*method\.checkpoint_dir",
        ),
    ],
)
def test_keys_are_checked_before_anything_is_loaded(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FeatCalAlgorithm(**keys)


PAPER = {"presets": {"paper_flan_t5": {"ridge_lambda": 1e-5, "mix_alpha": 0.6}}}


def test_presets_of_the_pool_are_taken_unless_they_are_the_runs_own() -> None:
    chosen = checked_choices(FeatCalSettings(), None, None, PAPER)
    assert list(chosen.presets) == ["paper_flan_t5"]
    assert checked_choices(FeatCalSettings(), {}, None, PAPER).presets == {}
    settings = FeatCalSettings(ridge_lambda=1e-5, mix_alpha=0.6, checkpoint_dir="somewhere")
    assert checked_choices(settings, None, None, PAPER).presets == {}
    (preset,) = checked_choices(settings, PAPER["presets"], None, {}).presets.values()
    assert preset.checkpoint_dir == "somewhere/preset-paper_flan_t5"


def test_anchor_without_a_base_is_refused_before_merging() -> None:
    pool = memory_pool()
    del pool._models["_pretrained_"]
    with pytest.raises(CalibrationError, match=r"_pretrained_.*method\.anchor_rho"):
        FeatCalAlgorithm(base_method=None).run(pool)


def test_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pool = pool_of({"_pretrained_": str(tmp_path / "empty")})
    with pytest.raises(
        CalibrationError, match=r"empty.*no weights in .*modelpool\.models\._pretrained_"
    ):
        FeatCalAlgorithm(base_method=AVERAGE).run(pool)


def test_pools_merged_model_is_calibrated_and_keeps_dtype_and_class() -> None:
    merged = CLIPVisionModel.from_pretrained(image.path()).bfloat16()
    pool = suite_pool()
    pool.load_model = _with_merged(pool, merged)
    pool._models["_merged_"] = image.path()
    before = {name: tensor.clone() for name, tensor in merged.state_dict().items()}
    result = FeatCalAlgorithm(base_method=None, samples_per_task=8).run(pool)
    assert type(result) is CLIPVisionModel
    assert {tensor.dtype for tensor in result.parameters()} == {torch.bfloat16}
    assert all(torch.equal(before[name], merged.state_dict()[name]) for name in before)
    assert any(not torch.equal(before[name], value) for name, value in result.state_dict().items())


def _with_merged(pool: CLIPVisionModelPool, merged: CLIPVisionModel) -> Any:
    load = pool.load_model
    return lambda name: merged if name == "_merged_" else load(name)


@pytest.mark.parametrize("stream", [True, False])
def test_streamed_and_whole_experts_give_the_same_model(stream: bool) -> None:
    result = FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=8, stream_experts=stream).run(
        suite_pool()
    )
    known = FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=8).run(suite_pool())
    for name, value in known.state_dict().items():
        assert torch.equal(result.state_dict()[name], value), name


def test_checkpoints_of_presets_lie_apart_and_are_resumed(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "base_method": AVERAGE,
        "samples_per_task": 4,
        "presets": {"weak": {"mix_alpha": 0.1}},
        "checkpoint_dir": str(tmp_path),
    }
    unused: dict[str, Any] = {**options, "base_method": AVERAGE}
    wanted = FeatCalAlgorithm(**options).run(suite_pool()).state_dict()
    assert (tmp_path / "blocks.json").is_file()
    assert (tmp_path / "preset-weak" / "block-0003.safetensors").is_file()
    with pytest.raises(CalibrationError, match=r"checkpoint_dir .*method\.resume=true"):
        FeatCalAlgorithm(**unused).run(suite_pool())
    found = FeatCalAlgorithm(**options, resume=True).run(suite_pool()).state_dict()
    assert all(torch.equal(wanted[name], tensor) for name, tensor in found.items())
    changed: dict[str, Any] = {**unused, "ridge_lambda": 1.0}
    with pytest.raises(CalibrationError, match=r"method\.ridge_lambda \(0\.05 then, 1\.0 now\)"):
        FeatCalAlgorithm(**changed, resume=True).run(suite_pool())


def test_read_budget_is_refused_where_an_expert_is_loaded_whole(tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    model = CLIPVisionModel.from_pretrained(image.path("mini_greek"))
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    models = {"_pretrained_": image.path(), "mini_greek": str(folder)}
    refusal = r"method\.expert_read_budget cannot be kept: expert 'mini_greek'.*loaded whole"
    merger = AVERAGE
    with pytest.raises(CalibrationError, match=refusal):
        FeatCalAlgorithm(base_method=merger, expert_read_budget="50%").run(
            suite_pool(models=models)
        )
    presets = {"half": {"expert_read_budget": "50%"}}
    with pytest.raises(CalibrationError, match=refusal):
        FeatCalAlgorithm(base_method=merger, presets=presets).run(suite_pool(models=models))
    fabric = SimpleNamespace(device=torch.device("cpu"))
    inputs = MethodInputs(suite_pool(models=models), None, fabric)
    with pytest.raises(CalibrationError, match=refusal):
        FeatCal(expert_read_budget="50%", samples_per_task=4).check(inputs)


def test_expert_of_another_width_is_named_before_merging(tmp_path: Path) -> None:
    config = CLIPVisionModel.from_pretrained(image.path()).config
    config.intermediate_size = 64
    CLIPVisionModel(config).save_pretrained(tmp_path / "narrow")
    models = {
        "_pretrained_": image.path(),
        "mini_greek": str(tmp_path / "narrow"),
        "mini_latin": image.path("mini_latin"),
    }
    with pytest.raises(CalibrationError, match=r"expert 'mini_greek': tensor '.*fc1.* has shape"):
        FeatCalAlgorithm(base_method=AVERAGE, samples_per_task=8).run(suite_pool(models=models))


def test_processor_that_cannot_be_found_offline_is_named() -> None:
    pool = suite_pool(processor="nobody/no-such-processor")
    with pytest.raises(CalibrationError, match=r"modelpool\.processor=nobody/no-such-processor: "):
        FeatCalAlgorithm(base_method=AVERAGE).run(pool)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"_target_": "fusion_bench.method.TaskArithmeticAlgorithm"}, "task_arithmetic"),
        ({"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}, "simple_average"),
        ({"_target_": "fusion_bench.method.WUDIMerging"}, "wudi_merging"),
        ({"name": "clip_layer_wise_adamerging"}, "clip_layer_wise_adamerging"),
    ],
)
def test_upstream_row_is_named_after_the_merger(config: dict[str, str], name: str) -> None:
    assert method_name(config) == name
