"""Upstream mergers fused with the calibration's reads: FusionBench's own bits, each expert once."""

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PLUS, assert_identical, run_fast
from fusion_bench import BaseModelPool
from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm
from safetensors.torch import save_file
from test_algorithm_pools import suite_pool
from test_experts_lora import write_adapter
from test_read_budget import with_parts_of
from test_resume import interrupt
from test_text_pools import causal_pool, llamas, t5_pool
from tiny_models import Suite, clip_suite, gpt2_suite, residual_suite, t5_suite
from tiny_open_clip import tower_suite
from tiny_texts import TASKS, t5_model
from torch import nn

from fusion_bench_featcal import CalibrationError, SafetensorsExpert, calibrate
from fusion_bench_featcal.algorithm import FeatCalAlgorithm
from fusion_bench_featcal.experts.merging import UpstreamMerge
from fusion_bench_featcal.fusionbench.fusing import _arithmetic, _average
from fusion_bench_featcal.fusionbench.pool_models import ExpertSources, PoolModels
from fusion_bench_featcal.fusionbench.upstream import Upstream
from fusion_bench_featcal.processes import Processes
from fusion_bench_featcal.settings import FeatCalSettings
from fusion_bench_featcal.suites import image

AVERAGE = {"_target_": "fusion_bench.method.SimpleAverageAlgorithm"}
ARITHMETIC = {"_target_": "fusion_bench.method.TaskArithmeticAlgorithm", "scaling_factor": 0.3}
CALM = {"mix_alpha": 0.0, "log_drift": False}


def counting_suite() -> Suite:
    """Models with integer buffers; FusionBench takes those whose differences are zero in sum."""
    suite = residual_suite()
    models = [suite.base, suite.merged, *suite.experts.values()]
    for seen, model in zip((3, 3, 1, 5), models, strict=True):
        model.register_buffer("seen", torch.tensor([seen, 7]))
        model.layers[1].register_buffer("ids", torch.arange(4))  # type: ignore[index, union-attr]
    return suite


def small_clip() -> Suite:
    return clip_suite(tasks=2, sizes=(2,))


def small_t5(**more: Any) -> Suite:
    return t5_suite(depths=(1, 1), tasks=2, **more)


SUITES: dict[str, tuple[Callable[[], Suite], dict[str, Any]]] = {
    "clip": (small_clip, {}),
    "clip without features": (small_clip, CALM),
    "clip, plus": (small_clip, PLUS),
    "clip, trials": (
        small_clip,
        PLUS | {"held_out": 1, "trials": 3, "task_weights": "drift"},
    ),
    "t5, held out": (small_t5, {"held_out": 1}),
    "t5, tied": (small_t5, {}),
    "t5, untied": (lambda: small_t5(untied=True), {}),
    "gpt2": (gpt2_suite, {}),
    "open_clip": (tower_suite, {}),
    "integers": (counting_suite, {}),
}


def merger(name: str, suite: Suite) -> tuple[nn.Module, UpstreamMerge, nn.Module]:
    """The model to begin with, the fused merger, and what FusionBench's own makes."""
    models = {"_pretrained_": suite.base, **suite.experts}
    pool = BaseModelPool({name: copy.deepcopy(model) for name, model in models.items()})
    if name == "average":
        first, begun = next(iter(suite.experts.items()))
        wanted = SimpleAverageAlgorithm().run(pool)
        return copy.deepcopy(begun), UpstreamMerge(_average, first, {}), wanted
    wanted = TaskArithmeticAlgorithm(scaling_factor=0.3).run(pool)
    return copy.deepcopy(suite.base), UpstreamMerge(_arithmetic(0.3), None, {}), wanted


def calibrated(suite: Suite, merged: nn.Module, merging: Any = None, **more: Any) -> Any:
    return run_fast(replace(suite, merged=merged), merging=merging, **more)


@pytest.mark.parametrize(
    ("name", "upstream"),
    [
        ("clip", "average"), ("clip without features", "arithmetic"),
        ("t5, untied", "arithmetic"), ("gpt2", "average"),
        ("open_clip", "arithmetic"), ("integers", "average"), ("integers", "arithmetic"),
        ("clip, plus", "average"), ("clip, plus", "arithmetic"),
        ("clip, trials", "average"), ("t5, held out", "arithmetic"),
    ],
)  # fmt: skip
def test_fused_merge_has_fusion_benchs_bits_and_so_has_the_calibrated_model(
    name: str, upstream: str
):
    make, more = SUITES[name]
    suite = make()
    merged, merging, wanted = merger(upstream, suite)
    found = calibrated(suite, merged, merging, **more)
    assert_identical(merged, wanted)
    assert_identical(found.model, calibrated(suite, wanted, **more).model)
    for task, places in found.reads["experts"].items():
        for place, entry in places.items():
            assert entry["planned"] == entry["read"], (task, place)


def test_what_does_not_go_with_merging_is_refused():
    suite = clip_suite()
    merged, merging, _ = merger("arithmetic", suite)

    class Two(Processes):
        size = 2

    cases: list[tuple[str, dict[str, Any]]] = [
        ("in_place would use up", {"in_place": True}),
        ("each process reads only its own", {"processes": Two()}),
    ]
    for message, more in cases:
        with pytest.raises(ValueError, match=message):
            calibrated(suite, merged, merging, **more)


@pytest.mark.parametrize("name", ["clip", "clip without features", "t5, tied", "gpt2"])
@pytest.mark.parametrize("upstream", ["average", "arithmetic"])
def test_merge_under_a_budget_takes_no_step_where_an_expert_is_not_read(name: str, upstream: str):
    make, more = SUITES[name]
    suite = make()
    function = _average if upstream == "average" else _arithmetic(0.3)
    merged, merging = copy.deepcopy(suite.base), UpstreamMerge(function, None, {})
    found = calibrated(suite, merged, merging, expert_read_budget="70%", **more)
    omitted = found.reads["plan"]["omitted"]
    assert any(omitted.values())
    based = with_parts_of(suite.base, suite, omitted)
    _, _, wanted = merger(upstream, based)
    assert_identical(merged, wanted)
    separate = calibrated(with_parts_of(wanted, suite, omitted), wanted, **more)
    assert_identical(found.model, separate.model)
    totals = found.reads["totals"]
    assert totals["experts_read"] <= found.reads["plan"]["limit"]
    assert totals["merged_stood_in"] > 0


@pytest.mark.parametrize("upstream", ["average", "arithmetic"])
def test_merge_under_a_full_budget_is_the_merge_without_one(upstream: str):
    suite = small_clip()
    _, _, wanted = merger(upstream, suite)
    function = _average if upstream == "average" else _arithmetic(0.3)
    begun = copy.deepcopy(suite.base)
    whole = calibrated(suite, begun, UpstreamMerge(function, None, {}), expert_read_budget="100%")
    assert_identical(begun, wanted)
    assert_identical(whole.model, calibrated(suite, wanted).model)


def started(
    config: Any, pool: Any, settings: FeatCalSettings | None = None, processes: int = 1
) -> tuple[nn.Module, UpstreamMerge | None]:
    """The merged model; or the one that is to become it, and the merger."""
    settings = settings or FeatCalSettings()
    upstream = Upstream(config, PoolModels(pool))
    upstream.plan_reads(settings, "auto", processes)
    return upstream.start(None, settings)


def run_of(pool: Any, config: Any, **options: Any) -> tuple[nn.Module, dict[str, Any], nn.Module]:
    """Calibrate a pool of files as the method does: the model, its manifest, the merged model."""
    settings = FeatCalSettings(samples_per_task=2, **options)
    merged, merging = started(config, pool, settings)
    assert merging is not None
    pictures = {task: [torch.ones(2, 3, 28, 28) * i] for i, task in enumerate(pool.model_names, 1)}
    experts = ExpertSources(PoolModels(pool), "auto")
    base = PoolModels(pool).base_source("auto")
    result = calibrate(merged, base, experts, pictures, settings, merging=merging, progress=False)
    return result.model, result.reads, merged


@pytest.mark.parametrize("config", [AVERAGE, ARITHMETIC], ids=["average", "arithmetic"])
def test_half_precision_files_that_load_in_single_are_merged_as_they_load(config: Any):
    pool = suite_pool()
    _, reads, merged = run_of(pool, config)
    assert_identical(merged, Upstream(config, PoolModels(pool)).merged_model(None))
    for task, places in reads["experts"].items():
        source = SafetensorsExpert(image.path(task))
        assert {source.stored_dtype(name) for name in source.names()} == {"F16"}
        read = sum(entry["read"] for entry in places.values())
        # what a checkpoint holds besides the vision tower is not read
        assert read <= sum(map(source.nbytes, source.names()))
        assert read == sum(t.numel() * 2 for t in merged.state_dict().values())


def test_text_models_are_fused_too(tmp_path: Path, caplog):
    caplog.set_level(logging.INFO)
    options: dict[str, Any] = {
        "samples_per_task": 6,
        "calibrate_norm": False,
        "base_method": AVERAGE,
    }
    found = FeatCalAlgorithm(**options).run(t5_pool(tmp_path))
    assert "simple_average shares the calibration's reads" in caplog.text
    caplog.clear()
    wanted = FeatCalAlgorithm(**options, fuse_merge=False).run(t5_pool(tmp_path))
    assert "simple_average runs by itself: method.fuse_merge is false" in caplog.text
    assert_identical(found, wanted)
    assert type(found) is type(wanted)


def test_presets_get_the_whole_merged_model():
    options: dict[str, Any] = {
        "base_method": ARITHMETIC,
        "samples_per_task": 2,
        "presets": {"weak": {"mix_alpha": 0.1}},
    }
    seen: list[tuple[Any, Any]] = []

    def run(**more: Any) -> Any:
        method = FeatCalAlgorithm(**options, **more)
        calibrate_one = method._calibrate

        def noted(*arguments: Any) -> Any:
            seen.append(calibrate_one(*arguments))
            return seen[-1]

        method._calibrate = noted  # type: ignore[method-assign]
        return method.run(suite_pool())

    run()
    run(fuse_merge=False)
    for (found, _), (wanted, _) in zip(seen[:2], seen[2:], strict=True):
        assert_identical(found.model, wanted.model)
    hows = [result.reads["upstream"]["how"] for result, _ in seen]
    assert hows == ["fused", "earlier", "by itself", "earlier"]
    files = [set(result.reads["upstream"]["files"]) for result, _ in seen]
    assert files[0] == {"_pretrained_"} and not files[1]
    assert files[2] == {"_pretrained_", "mini_greek", "mini_latin"}


@pytest.mark.parametrize(
    ("name", "kept", "upstream"),
    [
        ("clip", 1, "average"), ("clip", 2, "arithmetic"), ("t5, tied", 1, "arithmetic"),
        ("clip without features", 1, "average"),
    ],
)  # fmt: skip
def test_interrupted_run_goes_on_and_completes_the_merged_model(
    name: str, kept: int, upstream: str, tmp_path: Path, monkeypatch
):
    make, more = SUITES[name]
    suite = make()
    folder = {"checkpoint_dir": str(tmp_path)}
    merged, merging, wanted = merger(upstream, suite)
    if kept < len(suite.blocks):
        started = replace(suite, merged=merged)
        interrupt(started, tmp_path, kept, monkeypatch, merging=merging, **more)
    else:
        calibrated(suite, merged, merging, **folder, **more)
    merged, merging, _ = merger(upstream, suite)
    found = calibrated(suite, merged, merging, **folder, resume=True, **more)
    assert found.log.of_kind("resumed")[0]["blocks"] == kept
    assert_identical(merged, wanted)
    assert_identical(found.model, calibrated(suite, wanted, **more).model)


def test_blocks_of_a_merger_that_ran_by_itself_are_told_apart(tmp_path: Path):
    suite = clip_suite(tasks=1)
    merged, merging, wanted = merger("arithmetic", suite)
    merging = UpstreamMerge(merging.merge, None, {"fused": "task_arithmetic"})
    calibrated(suite, merged, merging, checkpoint_dir=str(tmp_path))
    with pytest.raises(CalibrationError, match=r"method\.base_method, method\.fuse_merge"):
        calibrated(suite, wanted, checkpoint_dir=str(tmp_path), resume=True)


@pytest.mark.parametrize("task", ["task_0", "task_1"])
def test_expert_that_is_not_finite_is_named(task: str):
    suite = small_clip()
    merged, merging, _ = merger("arithmetic", suite)
    name = f"{suite.blocks[1]}.mlp.fc1.weight"
    with torch.no_grad():
        suite.experts[task].get_parameter(name)[0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=rf"expert '{task}': tensor '{name}' has NaN"):
        calibrated(suite, merged, merging)


def other_dtype(folder: Path) -> Any:
    """A pool with an expert stored in another precision than the rest."""
    source = SafetensorsExpert(image.path("mini_greek"))
    tensors = {name: source.tensor(name).float() for name in source.names()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = Path(image.path("mini_greek")) / "config.json"
    (folder / "config.json").write_text(config.read_text())
    models = {"_pretrained_": image.path(), "mini_greek": str(folder)}
    return suite_pool(models=models | {"mini_latin": image.path("mini_latin")})


def other_config(folder: Path) -> Any:
    """A pool with an expert whose config names another precision."""
    pool = other_dtype(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return pool


def named_dtype(_: Path) -> Any:
    """A pool that loads one expert in another precision."""
    load = {
        "_target_": "transformers.CLIPVisionModel.from_pretrained",
        "pretrained_model_name_or_path": image.path("mini_greek"),
        "torch_dtype": "float16",
    }
    models = {"_pretrained_": image.path(), "mini_greek": load}
    return suite_pool(models=models | {"mini_latin": image.path("mini_latin")})


def lora_pool(folder: Path) -> Any:
    """A pool whose experts are LoRA adapters."""
    pool = t5_pool(folder)
    base = pool._models["_pretrained_"]["pretrained_model_name_or_path"]
    for task in TASKS:
        adapter = write_adapter(folder / f"{task}-lora", t5_model(), 0)
        pool._models[task] = {
            "_target_": "fusion_bench.modelpool.seq2seq_lm.modelpool.load_lora_model",
            "base_model_path": base,
            "peft_model_path": str(adapter),
        }
    return pool


def vocabulary_pool(folder: Path) -> Any:
    """A pool of Llamas whose vocabularies differ."""
    return causal_pool(llamas(folder, {"two": 30}), vocabulary="common_rows")


@pytest.mark.parametrize(
    ("config", "settings", "pool", "why"),
    [
        ({"_target_": "fusion_bench.method.TiesMergingAlgorithm"}, {}, None, "neither plain"),
        (AVERAGE | {"weights": [1]}, {}, None, "neither plain"),
        (ARITHMETIC | {"scaling_factor": "0.3"}, {}, None, "neither plain"),
        (ARITHMETIC, {"stream_experts": False}, None, "method.stream_experts is false"),
        (ARITHMETIC, {}, named_dtype, "loads its models in different ways"),
        (ARITHMETIC, {}, other_dtype, "stored in different dtypes"),
        (ARITHMETIC, {}, other_config, "configs name different dtypes"),
        (ARITHMETIC, {}, lora_pool, "one is a LoRA adapter, which is added to its base first"),
        (ARITHMETIC, {}, vocabulary_pool, "common_rows cuts the embeddings of _pretrained_"),
    ],
)
def test_merger_that_cannot_be_fused_runs_by_itself_and_says_why(
    config: Any, settings: Any, pool: Any, why: str, tmp_path: Path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO)
    ran: list[Any] = []
    linear = nn.Linear(1, 1)
    monkeypatch.setattr(Upstream, "merged_model", lambda *given: ran.append(given) or linear)
    chosen = suite_pool() if pool is None else pool(tmp_path / "other")
    _, merging = started(config, chosen, FeatCalSettings(**settings))
    assert merging is None and len(ran) == 1
    assert "runs by itself: " in caplog.text and why in caplog.text


def test_several_processes_and_models_in_memory_are_not_fused(caplog):
    caplog.set_level(logging.INFO)
    for pool, processes, why in [
        (suite_pool(), 2, "several processes"),
        (BaseModelPool(dict(_pretrained_=nn.Linear(2, 2), a=nn.Linear(2, 2))), 1, "lie whole"),
    ]:
        model, merging = started(ARITHMETIC, pool, processes=processes)
        assert isinstance(model, nn.Module) and merging is None
        assert why in caplog.text
