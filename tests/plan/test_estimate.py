"""Estimated bytes and memory are those of the run; plans say what lowers what."""

import io
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, settings_of
from rich.console import Console
from tiny_models import clip_suite, decoder_suite, residual_suite, t5_model, t5_suite
from torch import Tensor, is_tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.fusionbench.plan_run import log_plan
from fusion_bench_featcal.plan import estimate as module
from fusion_bench_featcal.plan.advice import advice
from fusion_bench_featcal.plan.dry_run import example_inputs
from fusion_bench_featcal.plan.estimate import HOLES, SCRATCH, Plan, Request, estimate
from fusion_bench_featcal.plan.levers import with_levers
from fusion_bench_featcal.plan.probe import probe
from fusion_bench_featcal.plan.show import one_line, show_plan, warnings_of
from fusion_bench_featcal.preflight import empty_model
from fusion_bench_featcal.settings import CalibrationError

CPU = torch.device("cpu")
SUITES = {"clip": clip_suite, "t5": t5_suite, "llama": decoder_suite}


def rate(dtype: torch.dtype, _: int) -> float:
    """A machine of 1 GFLOP/s, half of that in float64."""
    return 4e9 / max(dtype.itemsize, 4)


def planned(request: Request, **settings: Any) -> Plan:
    return estimate(replace(request, settings=request.settings.replace(**settings)), rate)


@pytest.fixture(scope="module")
def clip() -> Request:
    return Request(empty_model("clip-vit-base-patch32"), FeatCalSettings(samples_per_task=32), 2)


def equal_batches(inputs: Mapping[str, list]) -> dict[str, list]:
    """Each task's first batch, twice: batches of one size, as plans assume."""

    def whole(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch
        return {k: v.clamp_min(1) if "mask" in k else v for k, v in batch.items()}

    return {task: [whole(batches[0])] * 2 for task, batches in inputs.items()}


@pytest.mark.parametrize(("mix_alpha", "budget"), [(0.3, None), (0.3, "80%"), (0.0, None)], ids=str)
@pytest.mark.parametrize("name", SUITES)
def test_bytes_are_those_of_the_run(name: str, mix_alpha: float, budget: Any, tmp_path: Path):
    suite = SUITES[name]().to(torch.float32)
    inputs = equal_batches(suite.inputs)
    size = len(next(iter(inputs.values()))[0]["input_ids" if name != "clip" else "pixel_values"])
    changes = {"samples_per_task": 2 * size, "batch_size": size, "mix_alpha": mix_alpha}
    changes["expert_read_budget"] = budget
    settings = settings_of(PAPER, suite, log_drift=mix_alpha > 0, **changes)
    experts: dict[str, Any] = {}
    for task, expert in suite.experts.items():
        expert.save_pretrained(tmp_path / task)  # type: ignore[operator]
        experts[task] = SafetensorsExpert(tmp_path / task)
    found = calibrate(suite.merged, suite.base, experts, inputs, settings, progress=False)
    request = Request(hollow_copy(suite.merged).to("meta"), settings, len(suite.experts), length=7)
    assert estimate(request, rate).read == found.log.expert_bytes


class LiveBytes(TorchDispatchMode):
    """Largest number of bytes of tensors that operations made and that were alive at once."""

    peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.alive = {k: v for k, v in getattr(self, "alive", {}).items() if not v[0].expired()}
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if is_tensor(t)}
        for tensor in filter(is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if not tensor.is_meta and storage._cdata not in given:
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize(
    "changes",
    [
        {"samples_per_task": 64},
        pytest.param({"samples_per_task": 192}, marks=pytest.mark.slow),
        {"samples_per_task": 64, "mix_alpha": 0.0, "log_drift": False},
        pytest.param({"samples_per_task": 64, "ridge_lambda": 1e-4}, marks=pytest.mark.slow),
    ],
)
def test_memory_is_what_tensors_of_a_run_take(changes: dict[str, Any]):
    config = CLIPVisionConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=2, num_attention_heads=3,
        image_size=64, patch_size=16,
    )  # fmt: skip
    models: dict[str, nn.Module] = {n: CLIPVisionModel(config).eval() for n in "mbxyz"}
    settings = FeatCalSettings(batch_size=32, linear_kernel="torch", **changes)
    samples = settings.samples_per_task
    data = {task: [torch.randn(32, 3, 64, 64)] * (samples // 32) for task in "xyz"}
    experts = {task: models[task] for task in data}
    with LiveBytes() as live:
        calibrate(models["m"], models["b"], experts, data, settings, progress=False)
    found = estimate(Request(hollow_copy(models["m"]).to("meta"), settings, 3, loaded=1), rate)
    copy = found.parts["model"]
    expected = (found.host - found.own - SCRATCH - copy) / HOLES + copy
    assert expected == pytest.approx(live.peak, rel=0.25)


def test_fewer_passes_without_the_experts_features(clip: Request):
    both, one = planned(clip).stages[0], planned(clip, mix_alpha=0.0, log_drift=False).stages[0]
    assert set(both) == {"stem", "passes", "moments", "folds", "solves", "update"}
    assert one["passes"] == pytest.approx(both["passes"] / 2)
    assert one["stem"] == pytest.approx(both["stem"] / 2)
    assert one["update"] == pytest.approx(both["update"] * 11 / 12)
    assert one["moments"] < both["moments"]


def test_more_samples_and_tasks_cost_more(clip: Request):
    once, twice = planned(clip), planned(clip, samples_per_task=64)
    tasks = estimate(replace(clip, tasks=4), rate)
    assert twice.stages[0]["passes"] == pytest.approx(2 * once.stages[0]["passes"])
    assert twice.parts["activations"] == pytest.approx(2 * once.parts["activations"])
    assert (twice.read, twice.parts["statistics"]) == (once.read, once.parts["statistics"])
    assert tasks.stages[0]["folds"] == pytest.approx(2 * once.stages[0]["folds"])
    assert tasks.stages[0]["solves"] == pytest.approx(once.stages[0]["solves"])
    assert tasks.read == 2 * once.read


def test_small_tasks_count_as_they_are(clip: Request):
    small = estimate(replace(clip, samples=(32, 8)), rate)
    assert small.stages[0]["passes"] == pytest.approx(planned(clip).stages[0]["passes"] * 40 / 64)
    assert small.parts["activations"] == pytest.approx(planned(clip).parts["activations"] * 40 / 64)
    assert planned(clip, samples_per_task=4).parts["batch"] < planned(clip).parts["batch"] / 3


def test_processes_share_time_and_features():
    settings = FeatCalSettings(samples_per_task=32, batch_size=32)
    request = Request(empty_model("clip-vit-base-patch32"), settings, 8)
    one, two, many = (
        estimate(replace(request, processes=n, neighbours=n), rate) for n in (1, 2, 32)
    )
    assert (two.tasks, two.processes, two.neighbours) == (8, 2, 2)
    for step in ("passes", "moments", "folds"):
        assert two.stages[0][step] == pytest.approx(one.stages[0][step] / 2)
    assert one.stages[0]["solves"] / 2 <= two.stages[0]["solves"] < one.stages[0]["solves"]
    assert two.parts["activations"] == pytest.approx(one.parts["activations"] / 2, rel=1e-6)
    assert two.parts["statistics"] == one.parts["statistics"]
    assert two.read == one.read / 2
    # four processes a task, whose samples make one batch: no more than one task's work is left
    assert many.stages[0]["passes"] == pytest.approx(one.stages[0]["passes"] / 8)


def test_small_lambda_takes_float64_time_and_memory(clip: Request):
    plain, small = planned(clip), planned(clip, ridge_lambda=1e-4)
    for step in ("moments", "folds", "solves"):
        assert small.stages[0][step] == pytest.approx(2 * plain.stages[0][step])
    assert small.stages[0]["passes"] == plain.stages[0]["passes"]
    assert small.parts["statistics"] > 1.8 * plain.parts["statistics"]
    coarse = planned(clip, ridge_lambda=1e-4, sums_precision="float64")
    assert coarse.stages == small.stages


@pytest.mark.slow
def test_levers_lower_something_and_are_shown():
    model = t5_model(width=512).to("meta")
    settings = FeatCalSettings(samples_per_task=64, max_length=64)
    request = Request(model, settings, tasks=3, length=64, held=40)
    plan = with_levers(request, estimate(request, rate), rate)
    found = {lever.setting: lever for lever in plan.levers}
    assert {"stream_experts=true", "activations=disk", "max_length=32"} <= set(found)
    widest = "modules=['!wi_0', '!wi_1']"
    assert {"samples_per_task=32", "mix_alpha=0 log_drift=false", widest} <= set(found)
    assert found["activations=disk"].host < plan.host
    assert found["activations=disk"].same_model
    assert found["stream_experts=true"].host < plan.host - 0.9 * plan.parts["experts"]
    assert found["samples_per_task=32"].seconds < 0.7 * plan.seconds
    assert not found["samples_per_task=32"].same_model
    console = Console(width=120, record=True, file=io.StringIO())
    show_plan(plan, console)
    shown = console.export_text()
    for words in ("roughly", "stage 1", "solving", "features of all samples (device)",
                  "read from experts", "what changes what"):  # fmt: skip
        assert words in shown
    assert "of host memory" in one_line(plan)
    assert json.loads(json.dumps(plan.as_dict()))["seconds"] == pytest.approx(plan.seconds)


def test_a_process_that_grows_while_it_estimates_raises_no_setting_s_memory(
    clip: Request, monkeypatch: pytest.MonkeyPatch
):
    grown = iter(range(10**9, 10**12, 10**8))
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=next(grown)))
    monkeypatch.setattr("fusion_bench_featcal.plan.estimate.psutil.Process", lambda: process)
    request = replace(clip, tasks=3, fused=True)
    plan = with_levers(request, estimate(request, rate), rate)
    found = {lever.setting: lever.host for lever in plan.levers}
    assert max(found.values()) <= plan.host
    assert found["fuse_merge=false"] < plan.host
    console = Console(width=120, record=True, file=io.StringIO())
    show_plan(plan, console)
    cells = {
        row[0]: row[1:]
        for line in console.export_text().partition("what changes what")[2].splitlines()
        if len(row := [cell.strip() for cell in line.strip("│").split("│")]) > 1
    }
    time, host, read, model = cells["samples_per_task=16"]
    assert (time[0], host, read, model) == ("-", "=", "=", "another")
    assert cells["fuse_merge=false"][1][0] == "-"
    assert cells["expert_read_budget=50%"][2][0] == "-"
    assert not any(host.startswith("+") for _, host, _, _ in cells.values())


@pytest.mark.slow
def test_all_calibrations_of_a_run_are_planned(clip: Request):
    several = {**PLUS, "held_out": 8, "task_weights": "drift", "augment": "jitter"}
    one, three = (planned(clip, trials=trials, **several) for trials in (1, 3))
    assert (one.calibrations, three.calibrations) == (1, 3)
    assert three.seconds == pytest.approx(3 * one.seconds)
    assert three.read == 3 * one.read
    needed = [plan.host - plan.own for plan in (three, one)]  # memory in use moves meanwhile
    assert needed[0] - needed[1] == one.parts["model"]  # the best one so far
    request = replace(clip, settings=clip.settings.replace(trials=3, **several))
    plan = with_levers(request, three, rate)
    found = {lever.setting: lever for lever in plan.levers}
    assert found["trials=1"].seconds == pytest.approx(one.seconds)
    assert not {"log_drift=false", "expert_read_budget=50%"} & set(found)
    console = Console(width=120, record=True, file=io.StringIO())
    show_plan(plan, console)
    assert "at most 3 calibrations (method.trials)" in console.export_text()


def test_a_language_model_may_take_more_calibrations(clip: Request):
    text = Request(t5_model(width=64).to("meta"), clip.settings, tasks=3)
    plans = [planned(request, held_out=4, trials="auto", **PLUS) for request in (clip, text)]
    assert [plan.calibrations for plan in plans] == [1, 3]


def test_held_out_samples_have_no_copies(clip: Request):
    every = planned(clip, augment="jitter", held_out=0, **PLUS)
    fewer = planned(clip, augment="jitter", held_out=16, **PLUS)
    shares = [plan.parts["activations"] for plan in (fewer, every)]
    assert shares[0] / shares[1] == pytest.approx((16 * 8 + 16) / (32 * 8), rel=1e-3)


def test_a_batch_is_joined_by_the_copies_of_its_own_task(clip: Request):
    settings = {"augment": "jitter", "samples_per_task": 256, "batch_size": 16, **PLUS}
    requests = [replace(clip, tasks=len(n), samples=n) for n in ([8], [256], [8, 256])]
    few, many, both = (planned(request, **settings).parts["batch"] for request in requests)
    assert many < few == both  # 8 images with 7 copies of each, 16 images with one


def test_features_wait_where_there_is_room(clip: Request, monkeypatch: pytest.MonkeyPatch):
    free = {"cpu": 2**40, "cuda": 2**40}
    monkeypatch.setattr(module, "free_bytes", lambda device: free[device.type])
    plan, gpu = planned(clip), replace(clip, device=torch.device("cuda"))
    total = plan.waiting["device"]
    assert total == plan.parts["activations"] > 0
    assert not warnings_of(plan)
    on_gpu = estimate(gpu, rate)
    assert on_gpu.waiting["device"] == total
    assert "activations=host" in {lever.setting for lever in with_levers(gpu, on_gpu, rate).levers}
    free.update(cpu=2**20, cuda=2**20)
    plan = planned(clip)
    assert plan.waiting == {"device": 0, "host": 0, "disk": plan.disk}
    assert plan.disk == total
    (warning,) = warnings_of(plan)
    assert "host memory" in warning and "method.batch_size" in warning
    assert "activations=disk" not in warning
    plan = planned(gpu, activations="host")
    assert plan.waiting["host"] == total
    assert plan.gpu is not None and plan.gpu < plan.host
    assert len(warnings_of(plan)) == 2


def test_kept_blocks_count_as_files(clip: Request, tmp_path: Path):
    block = sum(p.nbytes for n, p in clip.model.named_parameters() if ".layers.0." in n)
    assert planned(clip, checkpoint_dir=str(tmp_path)).disk == 12 * block


def test_model_without_a_config_is_refused():
    with pytest.raises(ValueError, match="has no config that tells its inputs"):
        example_inputs(nn.Linear(2, 2), 1, 1, 1)


def test_advice_names_the_largest_first():
    parts = {"activations": 1, "batch": 3 * 2**30, "experts": 0, "statistics": 2**20}
    words = advice(parts, on_disk=False)
    assert words.index("batch_size") < words.index("method.modules") < words.index("activations")
    assert "3.00 GiB" in words
    assert "activations=" not in advice(parts, on_disk=True)


def test_probe_is_made_once():
    single, double = (probe(CPU, "torch", dtype, 128) for dtype in (torch.float32, torch.float64))
    assert 1e7 < double < single * 3
    assert probe(CPU, "torch", torch.float32, 128) == single


def test_runs_log_their_plan(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    suite = clip_suite()
    with caplog.at_level(logging.INFO, logger="fusion_bench_featcal"):
        plan = log_plan(suite.merged, FeatCalSettings(), 2, CPU)
        assert plan is not None and one_line(plan) in caplog.text
        monkeypatch.setattr(module, "free_bytes", lambda _: 1)
        log_plan(suite.merged, FeatCalSettings(), 2, CPU)
    assert "method.batch_size" in caplog.text
    suite = residual_suite()
    settings = FeatCalSettings(family={"name": "replay", "blocks": suite.blocks})
    assert log_plan(suite.merged, settings, 2, CPU) is None


def test_budget_limits_what_is_read():
    request = Request(t5_model(width=64).to("meta"), FeatCalSettings(samples_per_task=16), tasks=3)
    full = estimate(request, rate).read
    assert planned(request, expert_read_budget="1TB").read == full
    assert 0.8 * full < planned(request, expert_read_budget="90%").read <= 0.9 * full
    with pytest.raises(CalibrationError, match="expert_read_budget allows 9 bytes"):
        planned(request, expert_read_budget=9)
    clip = Request(empty_model("clip-vit-base-patch32"), request.settings, tasks=3)
    plan = estimate(clip, rate)
    lever = {one.setting: one for one in with_levers(clip, plan, rate).levers}
    assert lever["expert_read_budget=50%"].read <= plan.read // 2
    assert not lever["expert_read_budget=50%"].same_model


def test_fused_merge_holds_a_block_of_every_expert(clip: Request):
    alone = estimate(replace(clip, tasks=3), rate)
    fused = estimate(request := replace(clip, tasks=3, fused=True), rate)
    first = resolve_family("auto", clip.model).stages(clip.model)[0][0]
    block = sum(p.numel() * 4 for p in clip.model.get_submodule(first).parameters())
    assert fused.parts["block"] == alone.parts["block"] + 2 * block
    assert fused.host > alone.host + block
    levers = with_levers(request, fused, rate).levers
    found = {one.setting: one.host for one in levers}
    assert found["fuse_merge=false"] == pytest.approx(alone.host, rel=0.01)
