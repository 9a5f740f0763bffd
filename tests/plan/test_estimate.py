"""Planned bytes are the bytes of a run: reads, memory, waiting features and models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrations import PAPER, PLUS, settings_of, with_rule
from model_types import ROWS
from tiny_models import Suite, decoder_suite, t5_suite
from torch import Tensor, is_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import (
    CalibrationError,
    FeatCalSettings,
    Paper,
    Plus,
    SafetensorsExpert,
    calibrate,
    memory,
)
from fusion_bench_featcal import plan as module
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.feature_shapes import features_of
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.plan import Plan, check, plan_of
from fusion_bench_featcal.plan_shapes import Request, Shapes

CONFIG = CLIPVisionConfig(
    hidden_size=128, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2,
    image_size=64, patch_size=16,
)  # fmt: skip


def planned(request: Request, **settings: Any) -> Plan:
    return plan_of(replace(request, settings=request.settings.replace(**settings)))


@pytest.fixture(scope="module")
def clip() -> Request:
    model = hollow_copy(CLIPVisionModel(CONFIG)).to("meta")
    return Request(model, FeatCalSettings(samples_per_task=32), 2)


# --- plans and runs ---


def without_masks(suite: Suite) -> dict[str, list]:
    """Each task's first batch, twice, without padding: batches of one size, as plans assume."""

    def whole(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch
        return {key: value for key, value in batch.items() if "mask" not in key}

    return {task: [whole(batches[0])] * 2 for task, batches in suite.inputs.items()}


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (t5_suite, {"anchor_rho": 1.0}),
        (decoder_suite, PLUS | {"expert_read_budget": "60%"}),
    ],
)
def test_bytes_are_those_of_the_run(make: Any, changes: dict[str, Any], tmp_path: Path):
    suite = make().to(torch.float32)
    settings = settings_of(PAPER, suite, **changes)
    sources: dict[str, Any] = {}
    for name, model in (suite.experts | {"base": suite.base}).items():
        model.save_pretrained(tmp_path / name)
        sources[name] = SafetensorsExpert(tmp_path / name)
    base, inputs = sources.pop("base"), without_masks(suite)
    result = calibrate(suite.merged, base, sources, inputs, settings, progress=False)
    request = Request(hollow_copy(suite.merged).to("meta"), settings, len(sources), length=7)
    plan, totals = plan_of(request), result.reads["totals"]
    assert (plan.read, plan.base_read) == (totals["experts_read"], totals["base_read"])


class LiveBytes(TorchDispatchMode):
    """Largest number of bytes of tensors that operations returned and that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        new = {}
        for tensor in filter(is_tensor, tree_leaves(result)):
            storage = tensor.untyped_storage()
            if not tensor.is_meta:
                new[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        for tensor in filter(is_tensor, tree_leaves((args, kwargs))):  # not models and samples
            new.pop(tensor.untyped_storage()._cdata, None)
        self.alive |= new
        self.total += sum(size for _, size in new.values())
        if self.total > self.peak:
            self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
            self.total = sum(size for _, size in self.alive.values())
            self.peak = max(self.peak, self.total)
        return result


@pytest.mark.parametrize(("rule", "changes"), [(Paper(), {}), (Plus(), PLUS)], ids=str)
def test_memory_is_near_what_tensors_of_a_run_take(
    rule: Any, changes: dict[str, Any], clip: Request
):
    models: dict[str, Any] = {name: CLIPVisionModel(CONFIG).eval() for name in "mbxy"}
    settings = FeatCalSettings(**{"batch_size": 32, "samples_per_task": 64, **changes})
    experts = {task: models[task] for task in "xy"}
    data = dict.fromkeys(experts, [torch.randn(32, 3, 64, 64)] * 2)
    with LiveBytes() as live:
        calibrate(models["m"], models["b"], experts, data, with_rule(settings, rule))
    plan = plan_of(Request(clip.model, settings, 2, loaded=1))
    # Models in memory lend the tensors of a block.
    needed = plan.needs[0].needed - module.LIBRARIES - plan.parts["block"]
    assert needed == pytest.approx(live.peak, rel=0.3)


TYPES = ("clip_vision_model", "t5", "whisper", "llama", "resnet")


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in TYPES], ids=lambda r: r.name)
def test_features_are_those_that_blocks_receive(row: Any):
    model, batches = row.make()
    family = resolve_family("auto", model)
    model, inputs = family.view.arranged(model.double().eval()), next(iter(batches.values()))[0]
    stages, first = family.stages(model), next(iter(inputs.values()))
    first = inputs.get("pixel_values", inputs.get("input_ids", first))
    targets = inputs["labels"].shape[1] if "labels" in inputs else 0
    features, call = features_of(family, model, stages, first.shape[-1], targets), None
    for number, stage in enumerate(stages):
        ending = [family.ending(model, call)] if number and family.hands_on else []
        call = family.begin(model, inputs, stage[0], *ending)
        for block in stage:
            size = len(call.hidden) * features[block].positions * features[block].width
            assert size == call.hidden.numel(), block
            _, call = family.step(model, block, call)


# --- settings ---


def test_samples_processes_and_a_small_ridge_lambda(clip: Request):
    once, small = planned(clip), plan_of(replace(clip, samples=(32, 8)))
    assert small.parts["features"] == once.parts["features"] * 40 / 64
    assert planned(clip, samples_per_task=4).parts["batch"] < once.parts["batch"] / 3
    assert planned(clip, ridge_lambda=1e-4).parts["sums"] > 1.8 * once.parts["sums"]
    one, two, many = (plan_of(replace(clip, tasks=8, processes=n)) for n in (1, 2, 16))
    assert (two.tasks, two.processes) == (8, 2)
    assert two.parts["features"] == one.parts["features"] / 2 == 4 * many.parts["features"]
    assert two.parts["sums"] == one.parts["sums"]
    assert two.read == one.read / 2


def test_features_wait_where_settings_say(clip: Request, monkeypatch: pytest.MonkeyPatch):
    free = {"cpu": 2**40, "cuda": 2**40}
    for namespace in (module, memory):
        monkeypatch.setattr(namespace, "free_bytes", lambda device: free[device.type])
    plan, gpu = planned(clip), replace(clip, device=torch.device("cuda"))
    total = plan.parts["features"]
    assert (plan.storage, plan.disk) == ("device", 0)
    assert planned(clip, activations="host").storage == plan_of(gpu).storage == "device"
    on_disk = planned(clip, activations="disk")
    assert (on_disk.storage, on_disk.disk) == ("disk", total)
    assert plan.needs[0].needed - on_disk.needs[0].needed == total
    plan = planned(gpu, activations="host")
    assert plan.storage == "host" and plan.gpu is not None and plan.gpu < plan.host
    assert not check(plan)
    free["cuda"] = 2**20
    (warning,) = check(planned(gpu, activations="host"))
    assert "GPU memory" in warning


def test_runs_are_refused_beyond_the_margin(clip: Request, monkeypatch: pytest.MonkeyPatch):
    needed, swap = plan_of(clip).needs[0].needed, 2**20
    monkeypatch.setattr(module, "free_swap", lambda: swap)
    monkeypatch.setattr(module.sys, "platform", "linux")

    def checked(free: float, **settings: Any) -> list[str]:
        monkeypatch.setattr(module, "free_bytes", lambda _: int(free))
        return check(planned(clip, **settings))

    assert not checked(needed)
    (warning,) = checked(needed - 1)
    assert "host memory" in warning
    limit = needed / (1 + module.MARGIN) - swap
    assert checked(limit + 2)
    with pytest.raises(CalibrationError, match=r"nothing was calibrated.*method.activations=disk"):
        checked(limit - 2)
    assert checked(limit - 2, samples_per_task=16)


def test_files_of_a_run_need_room(clip: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert plan_of(replace(clip, fetches=3, itemsize=2)).fetched == 1.5 * planned(clip).output
    changes: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "blocks"), "activations": "disk"}
    changes["activations_dir"] = str(tmp_path)
    saving = replace(clip, out=tmp_path / "out", saved=2**20)
    plan = planned(saving, **changes)
    assert plan.disk == plan.parts["features"] + plan.output
    needed = plan.disk + 2**20
    assert [need.needed for need in plan.needs[1:]] == [needed]
    monkeypatch.setattr(module, "free_space", lambda _: needed - 1)
    message = rf"of disk space in {tmp_path}, .* Name .* by method.activations_dir or --out"
    with pytest.raises(CalibrationError, match=message):
        check(planned(saving, **changes))
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/block-0000.safetensors").write_bytes(b"1")  # of a run that is resumed
    check(planned(saving, **changes))


# --- models from configurations ---


def test_parameters_blocks_and_memory_of_a_published_model():
    model = empty_model("someone/Llama-3.2-3B-Instruct")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    request = Request(model, FeatCalSettings(samples_per_task=10, batch_size=10), 3, length=100)
    shapes = Shapes.of(request)
    assert parameters == 3_212_749_824
    assert ([len(stage) for stage in shapes.stages], shapes.family.name) == ([28], "llama")
    memory = plan_of(request).parts
    assert memory["model"] == 2 * parameters
    assert memory["features"] == 2 * 2 * 3 * 10 * 100 * 3072
    assert memory["solve"] == 2 * 4 * 3072 * 2 * 8192
