"""Predicted bytes are those of the run; plans say what lowers what."""

import io
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, settings_of
from rich.console import Console
from tiny_decoders import decoder_suite
from tiny_models import clip_suite, residual_suite
from tiny_t5 import t5_model, t5_suite
from torch import Tensor

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.boundary.plan_run import log_plan
from fusion_bench_featcal.engine import activations
from fusion_bench_featcal.engine.activations import Activations
from fusion_bench_featcal.engine.places import DiskPlace
from fusion_bench_featcal.engine.shares import Shares
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.plan import prediction
from fusion_bench_featcal.plan.constants import Constants, constants
from fusion_bench_featcal.plan.inputs import example_inputs, without_masks
from fusion_bench_featcal.plan.levers import with_levers
from fusion_bench_featcal.plan.memory import predict_memory, read_bytes
from fusion_bench_featcal.plan.prediction import Request, predict
from fusion_bench_featcal.plan.rates import Rates, measure_rates
from fusion_bench_featcal.plan.seconds import STEPS, Machine, predict_seconds
from fusion_bench_featcal.plan.shares import BusiestShare
from fusion_bench_featcal.plan.show import advice, one_line, show_plan, warnings_of
from fusion_bench_featcal.plan.work import count_work
from fusion_bench_featcal.preflight import empty_model
from fusion_bench_featcal.settings import CalibrationError

CPU = torch.device("cpu")
SUITES = {"clip": clip_suite, "t5": t5_suite, "llama": decoder_suite}


def equal_batches(inputs: Mapping[str, list]) -> dict[str, list]:
    """Each task's first batch, twice: batches of one size, as plans assume."""

    def whole(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch
        return {k: v.clamp_min(1) if "mask" in k else v for k, v in batch.items()}

    return {task: [whole(batches[0])] * 2 for task, batches in inputs.items()}


@pytest.mark.parametrize("mix_alpha", [0.3, 0.0])
@pytest.mark.parametrize("name", SUITES)
def test_bytes_are_those_of_the_run(
    name: str, mix_alpha: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    suite = SUITES[name]().to(torch.float32)
    inputs = equal_batches(suite.inputs)
    size = len(next(iter(inputs.values()))[0]["input_ids" if name != "clip" else "pixel_values"])
    changes = {"samples_per_task": 2 * size, "batch_size": size, "mix_alpha": mix_alpha}
    settings = settings_of(PAPER, suite, log_drift=mix_alpha > 0, **changes)
    opened = Activations([DiskPlace(str(tmp_path))])
    monkeypatch.setattr("fusion_bench_featcal.engine.start.open_activations", lambda *_: opened)
    experts: dict[str, Any] = {}
    for task, expert in suite.experts.items():
        expert.save_pretrained(tmp_path.parent / name / task)  # type: ignore[operator]
        experts[task] = SafetensorsExpert(tmp_path.parent / name / task)
    found = calibrate(suite.merged, suite.base, experts, inputs, settings, progress=False)
    example = without_masks(next(iter(inputs.values()))[0])
    work = count_work(hollow_copy(suite.merged).to("meta"), example, settings)
    assert read_bytes(work, settings, len(suite.experts)) == found.log.expert_bytes
    carried = predict_memory(work, settings, len(suite.experts), constants()).carried
    one_batch = carried / 4
    assert carried * 0.6 < opened.peak["files"] < carried + 2 * one_batch  # the rest: masks, inputs


def test_fewer_passes_without_the_experts_features(rates: Rates):
    model = empty_model("clip-vit-base-patch32")
    machine = Machine(rates, Constants())
    seconds = {}
    for name, changes in {"both": {}, "one": {"mix_alpha": 0.0, "log_drift": False}}.items():
        settings = FeatCalSettings(samples_per_task=32, **changes)
        work = count_work(model, example_inputs(model, 16, 0, 0), settings)
        seconds[name] = predict_seconds(work, settings, 2, machine)
    assert set(seconds["both"]) == set(STEPS)
    assert seconds["one"]["passes"] < seconds["both"]["passes"] / 2
    assert seconds["one"]["stem"] == pytest.approx(seconds["both"]["stem"] / 2)
    assert seconds["one"]["update"] == pytest.approx(seconds["both"]["update"] * 11 / 12)
    assert seconds["one"]["moments"] < seconds["both"]["moments"]


def test_time_is_linear_in_tasks_and_samples(rates: Rates):
    request = Request(empty_model("clip-vit-base-patch32"), FeatCalSettings(samples_per_task=32), 2)
    more = replace(request, settings=request.settings.replace(samples_per_task=64))
    steps = [predict(one, rates).stages[0] for one in (request, more, replace(request, tasks=4))]
    assert steps[1]["passes"] == pytest.approx(2 * steps[0]["passes"])
    assert steps[2]["folds"] == pytest.approx(2 * steps[0]["folds"])
    assert steps[2]["solves"] == pytest.approx(steps[0]["solves"])


@pytest.mark.parametrize("tasks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7, 16])
def test_the_busiest_share_is_what_the_engine_deals_out(tasks: int, processes: int):
    samples, size = 50, 8
    settings = FeatCalSettings(samples_per_task=samples, batch_size=size)
    names = tuple(f"task_{index}" for index in range(tasks))
    batches = [min(size, samples - start) for start in range(0, samples, size)]
    work = []
    for rank in range(processes):
        shares = Shares(names, rank, processes)
        work.append([sum(shares.cut(task, batches)) for task in shares.mine])
    found = BusiestShare.of(settings, tasks, processes, experts=tasks, base=True)
    assert found.tasks == max(map(len, work))
    assert found.solvers == len(Shares(names, 0, processes).leaders)
    assert found.held == 1 + found.tasks
    most = max(map(max, work))
    assert most <= found.samples < most + size  # a short last batch counts as a whole one


def test_processes_share_time_and_features(rates: Rates):
    settings = FeatCalSettings(samples_per_task=32, batch_size=32)
    request = Request(empty_model("clip-vit-base-patch32"), settings, 8)
    one, two, many = (
        predict(replace(request, processes=n, neighbours=n), rates) for n in (1, 2, 32)
    )
    assert (two.tasks, two.processes, two.neighbours) == (8, 2, 2)
    for step in ("reading", "passes", "moments", "folds"):
        assert two.stages[0][step] == pytest.approx(one.stages[0][step] / 2)
    assert one.stages[0]["solves"] / 2 < two.stages[0]["solves"] < one.stages[0]["solves"]
    assert two.parts["activations"] == pytest.approx(one.parts["activations"] / 2, rel=1e-6)
    assert two.parts["statistics"] == one.parts["statistics"]
    assert two.read == one.read / 2
    # four processes a task, whose samples make one batch: no more than one task's work is left
    assert many.stages[0]["passes"] == pytest.approx(one.stages[0]["passes"] / 8)


def test_float64_solves_are_predicted_where_lambda_is_small(rates: Rates):
    slow = replace(rates, solve_wide=((10.0, 1e8), (1000.0, 1e8)))
    request = Request(empty_model("clip-vit-base-patch32"), FeatCalSettings(samples_per_task=16), 1)
    small = replace(request, settings=request.settings.replace(ridge_lambda=1e-4))
    plans = [predict(one, slow) for one in (request, small)]
    assert plans[1].stages[0]["solves"] > 2 * plans[0].stages[0]["solves"]
    assert plans[1].parts["statistics"] > plans[0].parts["statistics"]


def test_levers_lower_something_and_are_shown(rates: Rates):
    model = t5_model(width=512).to("meta")
    settings = FeatCalSettings(samples_per_task=64, max_length=64)
    request = Request(model, settings, tasks=3, length=64, held=40)
    plan = with_levers(request, rates, predict(request, rates))
    found = {lever.setting: lever for lever in plan.levers}
    assert {"stream_experts=true", "activations=disk", "max_length=32"} <= set(found)
    assert {
        "samples_per_task=32",
        "mix_alpha=0 log_drift=false",
        "modules=['!wi_0', '!wi_1']",
    } <= set(found)
    assert found["activations=disk"].host < plan.host
    assert found["activations=disk"].same_model
    assert found["stream_experts=true"].host == plan.host - plan.parts["experts"]
    assert found["samples_per_task=32"].seconds < 0.6 * plan.seconds
    assert not found["samples_per_task=32"].same_model
    console = Console(width=120, record=True, file=io.StringIO())
    show_plan(plan, console)
    shown = console.export_text()
    for words in ("stage 1", "solving", "features of all samples (device)", "read from experts"):
        assert words in shown
    assert "what lowers what" in shown
    assert "of host memory" in one_line(plan)
    assert json.loads(json.dumps(plan.as_dict()))["seconds"] == pytest.approx(plan.seconds)


def test_features_wait_where_there_is_room(rates: Rates, monkeypatch: pytest.MonkeyPatch):
    model, settings = empty_model("clip-vit-base-patch32"), FeatCalSettings()
    monkeypatch.setattr(prediction, "free_bytes", lambda device: 2**40)
    plan = predict(Request(model, settings, 8), rates)
    total = plan.waiting["device"]
    assert total == plan.parts["activations"] > 0
    assert not warnings_of(plan)
    monkeypatch.setattr(prediction, "free_bytes", lambda device: 2**20)
    plan = predict(Request(model, settings, 8), rates)
    assert plan.waiting == {"device": 0, "host": 0, "disk": plan.disk}
    assert plan.disk > 0
    (warning,) = warnings_of(plan)
    assert "host memory" in warning and "method.batch_size" in warning
    gpu = torch.device("cuda")
    plan = predict(Request(model, settings.replace(activations="host"), 8, device=gpu), rates)
    assert plan.waiting["host"] == total
    assert plan.gpu is not None and plan.gpu < plan.host
    assert len(warnings_of(plan)) == 2
    sizes = {"cuda": 2**40, "cpu": 2**40}
    monkeypatch.setattr(prediction, "free_bytes", lambda device: sizes[device.type])
    plan = predict(Request(model, settings, 8, device=gpu), rates)
    assert plan.waiting["device"] == total
    request = Request(model, settings, 8, device=gpu)
    found = {lever.setting for lever in with_levers(request, rates, plan).levers}
    assert "activations=host" in found


def test_kept_blocks_count_as_files(rates: Rates, tmp_path: Path):
    model = empty_model("clip-vit-base-patch32")
    settings = FeatCalSettings(checkpoint_dir=str(tmp_path))
    plan = predict(Request(model, settings, 2), rates)
    block = sum(p.nbytes for n, p in model.named_parameters() if ".layers.0." in n)
    assert plan.disk == 12 * block


def test_model_without_a_config_is_refused():
    with pytest.raises(ValueError, match="has no config that tells its inputs"):
        example_inputs(torch.nn.Linear(2, 2), 1, 1, 1)


def test_advice_names_the_largest_first():
    parts = {"activations": 1, "batch": 3 * 2**30, "experts": 0, "statistics": 2**20}
    words = advice(parts, {"device": 1})
    assert words.index("batch_size") < words.index("method.modules") < words.index("activations")
    assert "3.00 GiB" in words
    assert "activations=" not in advice(parts, {"device": 0, "disk": 1})


def test_rates_are_measured_kept_and_read_again(tmp_path: Path, rates: Rates):
    measured = measure_rates(quick=True)
    assert measured.at("linear", 1) > 0
    measured.write(tmp_path / "rates.json")
    assert Rates.read(tmp_path / "rates.json") == measured
    between = replace(rates, gram=((10.0, 1e8), (1000.0, 1e10)))
    assert between.at("gram", 100) == pytest.approx(1e9)
    assert between.at("gram", 1e6) == pytest.approx(1e10)
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"other\.json holds no rates"):
        Rates.read(tmp_path / "other.json")


def test_shipped_constants_are_usable():
    assert all(value >= 0 for value in vars(constants()).values())


def test_runs_log_their_plan(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    suite = clip_suite()
    with caplog.at_level(logging.INFO, logger="fusion_bench_featcal"):
        plan = log_plan(suite.merged, FeatCalSettings(), 2, CPU)
        assert plan is not None and one_line(plan) in caplog.text
        monkeypatch.setattr(prediction, "free_bytes", lambda _: 1)
        log_plan(suite.merged, FeatCalSettings(), 2, CPU)
    assert "method.batch_size" in caplog.text
    suite = residual_suite()
    settings = FeatCalSettings(family={"name": "replay", "blocks": suite.blocks})
    assert log_plan(suite.merged, settings, 2, CPU) is None
    assert activations.HOST_SHARE < 1


def test_a_budget_limits_what_is_read(rates: Rates):
    settings = FeatCalSettings(samples_per_task=16)
    plan = predict(request := Request(t5_model(width=64).to("meta"), settings, tasks=3), rates)
    stems = plan.read - 3 * sum(block.read for block in prediction.count(request).blocks)
    for budget, wanted in (("90%", plan.read * 9 // 10), (stems, stems), ("1TB", plan.read)):
        limited = replace(request, settings=settings.replace(expert_read_budget=budget))
        assert predict(limited, rates).read == wanted
    short = replace(request, settings=settings.replace(expert_read_budget=stems - 1))
    with pytest.raises(CalibrationError, match=f"expert_read_budget allows {stems - 1} bytes"):
        predict(short, rates)
    clip = Request(empty_model("clip-vit-base-patch32"), settings, tasks=3)
    plan = predict(clip, rates)
    lever = {one.setting: one for one in with_levers(clip, rates, plan).levers}
    assert lever["expert_read_budget=50%"].read == plan.read // 2
    assert not lever["expert_read_budget=50%"].same_model


def test_rates_of_onednn_are_measured_as_the_engine_multiplies(monkeypatch: pytest.MonkeyPatch):
    laid_out: list[bool] = []

    def product(left: Any, right: Any) -> Any:
        laid_out.append(left.is_contiguous() and right.is_contiguous())
        return left @ right.T

    monkeypatch.setattr("fusion_bench_featcal.core.products.multiply_transposed", product)
    monkeypatch.setattr("fusion_bench_featcal.core.kernels.onednn_works", lambda: True)
    measure_rates(torch.device("cpu"), linear_kernel="onednn", quick=True)
    assert laid_out
    assert all(laid_out)


def test_a_fused_merge_holds_a_block_of_every_expert(rates: Rates):
    settings = FeatCalSettings(samples_per_task=16)
    model = empty_model("clip-vit-base-patch32")
    alone = predict(request := Request(model, settings, tasks=3), rates)
    fused = predict(replace(request, fused=True), rates)
    first = resolve_family("auto", model).stages(model)[0][0]
    block = sum(p.numel() * 4 for p in model.get_submodule(first).parameters())
    assert fused.parts["block"] == alone.parts["block"] + 2 * block
    assert fused.host > alone.host + block
    plan = with_levers(replace(request, fused=True), rates, fused)
    assert {one.setting: one.host for one in plan.levers}["fuse_merge=false"] == pytest.approx(
        alone.host, rel=0.01
    )
