"""Planned bytes are the bytes of a run: reads, sums, waiting features and models."""

import gc
import io
import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from calibrations import PAPER, PLUS, settings_of, with_rule
from model_types import ROWS
from rich.console import Console
from tiny_models import (
    clip_suite,
    decoder_suite,
    gpt2_suite,
    residual_suite,
    t5_suite,
)
from torch import Tensor, is_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CLIPVisionConfig, CLIPVisionModel

from fusion_bench_featcal import FeatCalSettings, SafetensorsExpert, calibrate, memory
from fusion_bench_featcal import plan as module
from fusion_bench_featcal.experts import hollow_copy
from fusion_bench_featcal.families import resolve_family
from fusion_bench_featcal.feature_shapes import features_of
from fusion_bench_featcal.fusionbench.empty_models import empty_model
from fusion_bench_featcal.fusionbench.plan_run import log_plan, run_request
from fusion_bench_featcal.modules.groups import Group
from fusion_bench_featcal.plan import Plan, check, one_line, plan_of, show_plan
from fusion_bench_featcal.plan_shapes import Request, Shapes
from fusion_bench_featcal.rules.paper import Paper
from fusion_bench_featcal.rules.plus import Plus
from fusion_bench_featcal.settings import CalibrationError
from fusion_bench_featcal.streams.batch import Batch

CPU = torch.device("cpu")
SUITES: dict[str, Any] = {
    "clip": clip_suite,
    "t5": t5_suite,
    "llama": decoder_suite,
    "gpt2": gpt2_suite,
}
RULES = {"paper": (Paper(), {}), "plus": (Plus(), PLUS)}


def planned(request: Request, **settings: Any) -> Plan:
    return plan_of(replace(request, settings=request.settings.replace(**settings)))


@pytest.fixture(scope="module")
def clip() -> Request:
    return Request(empty_model("clip-vit-base-patch32"), FeatCalSettings(samples_per_task=32), 2)


def equal_batches(inputs: Mapping[str, list]) -> dict[str, list]:
    """Each task's first batch, twice, without padding: batches of one size, as plans assume."""

    def whole(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch
        return {k: v for k, v in batch.items() if "mask" not in k}

    return {task: [whole(batches[0])] * 2 for task, batches in inputs.items()}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("clip", {"mix_alpha": 0.0, "log_drift": False}),
        ("clip", {"expert_read_budget": "80%"}),
        ("clip", PLUS | {"expert_read_budget": "60%"}),
        ("t5", {"anchor_rho": 1.0}),
        ("t5", {"expert_read_budget": "80%"}),
        ("t5", PLUS),
        ("llama", {}),
        ("llama", PLUS | {"expert_read_budget": "60%"}),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_run(name: str, changes: Any, tmp_path: Path):
    suite = SUITES[name]().to(torch.float32)
    settings = settings_of(PAPER, suite, **changes)
    sources: dict[str, Any] = {}
    for task, expert in (suite.experts | {"base": suite.base}).items():
        expert.save_pretrained(tmp_path / task)  # type: ignore[operator]
        sources[task] = SafetensorsExpert(tmp_path / task)
    inputs, base = equal_batches(suite.inputs), sources.pop("base")
    result = calibrate(suite.merged, base, sources, inputs, settings, progress=False)
    request = Request(hollow_copy(suite.merged).to("meta"), settings, len(sources), length=7)
    plan, totals = plan_of(request), result.reads["totals"]
    assert (plan.read, plan.base_read) == (totals["experts_read"], totals["base_read"])


class Spy:
    """A rule that notes the bytes of its sums, turn by turn, and of the features that wait."""

    weighs_trust = False  # that makes another rule

    def __init__(self, rule: Any) -> None:
        self.rule, self.summed, self.waiting = rule, [0], [0]
        self.groups: list[Group] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rule, name)

    def turns(self, groups: Any) -> Any:
        self.groups += groups
        turns = self.rule.turns(groups)
        self.first = {id(turn[0]) for turn in turns if turn}
        return turns

    def sums(self, group: Any, merged: Any, base: Any) -> "SpySums":
        if id(group) in self.first:
            self.summed.append(0)
        return SpySums(self.rule.sums(group, merged, base), self)


class SpySums:
    """Sums that note the bytes of what they hold and of a task's rows."""

    def __init__(self, sums: Any, spy: Spy) -> None:
        self._sums, self._spy, self._rows = sums, spy, 0

    def add(self, task: str, rows: Any, expert: Any) -> Any:
        self._rows = sum(t.nbytes for t in rows.tensors())
        return self._sums.add(task, rows, expert)

    def tensors(self) -> Any:
        return self._sums.tensors()

    def solve(self) -> Any:
        self._spy.summed[-1] += self._rows + sum(t.nbytes for t in self._sums.tensors())
        batches = [each for each in gc.get_objects() if isinstance(each, Batch)]
        self._spy.waiting.append(sum(map(waiting_bytes, batches)))
        return self._sums.solve()


def waiting_bytes(batch: Batch) -> int:
    """Bytes of hidden features, position biases and noted features of a batch, each once."""
    calls = [batch.cal, batch.exp, batch.merged]
    tensors = [tensor for noted in batch.noted.values() for tensor in noted]
    tensors += [getattr(call, name, None) for call in calls for name in ("hidden", "bias")]
    tensors += [call.kwargs.get("encoder_hidden_states") for call in calls if call is not None]
    return sum({id(t): t.nbytes for t in tensors if isinstance(t, Tensor)}.values())


COPIES = [("clip", "plus", {"held_out": 2}), ("clip", "plus", {"augment": "jitter"})]


@pytest.mark.parametrize(
    ("name", "rule", "copies"),
    [*((name, rule, {}) for name in SUITES for rule in RULES), *COPIES],
    ids=str,
)
def test_sums_and_waiting_features_are_those_of_a_run(name: str, rule: str, copies: Any):
    suite = SUITES[name]().to(torch.float32)
    instance, changes = RULES[rule]
    spy, inputs = Spy(instance), equal_batches(suite.inputs)
    first = next(iter(inputs.values()))[0]
    size = len(first["pixel_values"] if name == "clip" else first["input_ids"])
    more = {"samples_per_task": 2 * size, "batch_size": size, **changes, **copies}
    settings = settings_of(PAPER, suite, ridge_lambda=0.05, **more)
    calibrate(suite.merged, suite.base, suite.experts, inputs, with_rule(settings, spy))
    lengths = {"length": 7, "target_length": first["labels"].shape[1]} if name == "t5" else {}
    if name in ("llama", "gpt2"):
        lengths["length"] = first["input_ids"].shape[1]
    request = Request(hollow_copy(suite.merged).to("meta"), settings, len(inputs), **lengths)
    parts = plan_of(request).parts
    assert parts["features"] == max(spy.waiting)
    if copies:
        return
    assert parts["sums"] == max(spy.summed)
    shapes = Shapes.of(request)
    planned = [group.sites for block in shapes.modules for group in shapes.groups(block)]
    ran = [group.sites for group in spy.groups]
    names = [{frozenset(site.name for site in sites) for sites in all_} for all_ in (planned, ran)]
    assert names[0] == names[1]


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
    ("rule", "changes"),
    [
        (Paper(), {}),
        (Plus(), PLUS),
        pytest.param(Paper(), {"samples_per_task": 192}, marks=pytest.mark.slow),
        pytest.param(Paper(ridge_lambda=1e-4), {"ridge_lambda": 1e-4}, marks=pytest.mark.slow),
    ],
    ids=["paper", "plus", "more samples", "small lambda"],
)
def test_memory_is_near_what_tensors_of_a_run_take(rule: Any, changes: dict[str, Any]):
    config = CLIPVisionConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=2, num_attention_heads=3,
        image_size=64, patch_size=16,
    )  # fmt: skip
    models: dict[str, Any] = {name: CLIPVisionModel(config).eval() for name in "mbxyz"}
    settings = FeatCalSettings(**{"batch_size": 32, "samples_per_task": 64, **changes})
    batches = [torch.randn(32, 3, 64, 64)] * (settings.samples_per_task // 32)
    experts = {task: models[task] for task in "xyz"}
    with LiveBytes() as live:
        data = dict.fromkeys(experts, batches)
        calibrate(models["m"], models["b"], experts, data, with_rule(settings, rule))
    request = Request(hollow_copy(models["m"]).to("meta"), settings, 3, loaded=1)
    plan = plan_of(request)
    # Models in memory lend the tensors of a block.
    planned = plan.needs[0].needed - module.LIBRARIES - plan.parts["block"]
    assert planned == pytest.approx(live.peak, rel=0.3)


def test_task_with_fewer_samples_and_a_small_ridge_lambda(clip: Request):
    once, small = planned(clip), plan_of(replace(clip, samples=(32, 8)))
    assert small.parts["features"] == once.parts["features"] * 40 / 64
    assert planned(clip, samples_per_task=4).parts["batch"] < once.parts["batch"] / 3
    assert planned(clip, ridge_lambda=1e-4).parts["sums"] > 1.8 * once.parts["sums"]


def test_processes_share_features_and_reads():
    settings = FeatCalSettings(samples_per_task=32, batch_size=32)
    request = Request(empty_model("clip-vit-base-patch32"), settings, 8)
    one, two, many = (plan_of(replace(request, processes=n)) for n in (1, 2, 16))
    assert (two.tasks, two.processes) == (8, 2)
    assert two.parts["features"] == one.parts["features"] / 2 == 4 * many.parts["features"]
    assert two.parts["sums"] == one.parts["sums"]
    assert two.read == one.read / 2


def test_features_wait_where_settings_say(clip: Request, monkeypatch: pytest.MonkeyPatch):
    free = {"cpu": 2**40, "cuda": 2**40}
    for place in (module, memory):
        monkeypatch.setattr(place, "free_bytes", lambda device: free[device.type])
    plan, gpu = planned(clip), replace(clip, device=torch.device("cuda"))
    total = plan.parts["features"]
    assert (plan.storage, plan.disk) == ("device", 0)
    assert planned(clip, activations="host").storage == plan_of(gpu).storage == "device"
    on_disk = planned(clip, activations="disk")
    assert (on_disk.storage, on_disk.disk) == ("disk", total)
    assert plan.host - on_disk.host == pytest.approx(total, rel=0.01)
    plan = planned(gpu, activations="host")
    assert plan.storage == "host"
    assert plan.gpu is not None and plan.gpu < plan.host
    assert not check(plan)
    free["cuda"] = 2**20
    (warning,) = check(planned(gpu, activations="host"))
    assert "GPU memory" in warning


@pytest.mark.parametrize("processes", [1, 2])
def test_runs_are_refused_beyond_the_margin(
    processes: int, clip: Request, monkeypatch: pytest.MonkeyPatch
):
    clip, swap = replace(clip, processes=processes), 2**26
    monkeypatch.setattr(module, "free_swap", lambda: swap)
    monkeypatch.setattr(module.sys, "platform", "linux")
    needed = plan_of(clip).needs[0].needed

    def checked(free: float, **settings: Any) -> list[str]:
        monkeypatch.setattr(module, "free_bytes", lambda _: int(free))
        return check(planned(clip, **settings))

    assert not checked(needed)
    (warning,) = checked(needed - 1)
    assert "host memory" in warning
    limit = needed / (1 + module.MARGIN) - swap
    assert checked(limit + 2)
    if processes > 1:  # they may be on several machines
        assert checked(limit - 2)
        return
    with pytest.raises(CalibrationError, match=r"nothing was calibrated.*method.activations=disk"):
        checked(limit - 2)
    assert checked(limit - 2, samples_per_task=16)


def test_files_of_a_run_need_room(clip: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert plan_of(replace(clip, fetches=3, itemsize=2)).fetched == 1.5 * planned(clip).output
    changes: dict[str, Any] = {"checkpoint_dir": str(tmp_path / "blocks"), "activations": "disk"}
    changes["activations_dir"] = str(tmp_path)
    plan = planned(replace(clip, out=tmp_path / "out", saved=2**20), **changes)
    assert plan.disk == plan.parts["features"] + plan.output
    needed = plan.disk + 2**20
    assert [need.needed for need in plan.needs[1:]] == [needed]
    monkeypatch.setattr(module, "free_space", lambda _: needed - 1)
    message = (
        rf"of disk space in {tmp_path}, .* are free. Name .* by method.activations_dir or --out"
    )
    with pytest.raises(CalibrationError, match=message):
        check(planned(replace(clip, out=tmp_path / "out", saved=2**20), **changes))
    (tmp_path / "blocks").mkdir()
    (tmp_path / "blocks/block-0000.safetensors").write_bytes(b"1")  # of a run that is resumed
    check(planned(replace(clip, out=tmp_path / "out", saved=2**20), **changes))


UNKNOWN = ("qwen2_vl", "qwen2_5_vl")  # as many patches as images have
OTHER_SIZE = "convnext"  # of inputs


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name != OTHER_SIZE], ids=lambda row: row.name
)
def test_features_are_those_that_blocks_receive(row: Any):
    made = row.make()
    if made is None:
        pytest.skip("not in this release of transformers")
    family = resolve_family("auto", made[0])
    if row.name in UNKNOWN:
        with pytest.raises(ValueError, match="number of positions"):
            features_of(family, made[0], family.stages(made[0]), 8, 8)
        return
    model, inputs = family.view.arranged(made[0].double().eval()), next(iter(made[1].values()))[0]
    stages, first = family.stages(model), next(iter(inputs.values()))
    first = inputs.get("pixel_values", inputs.get("input_ids", first))
    targets = inputs["labels"].shape[1] if "labels" in inputs else 0
    found, call = features_of(family, model, stages, first.shape[-1], targets), None
    for number, stage in enumerate(stages):
        ending = [family.ending(model, call)] if number and family.hands_on else []
        call = family.begin(model, inputs, stage[0], *ending)
        for block in stage:
            planned = len(call.hidden) * found[block].positions * found[block].width
            assert planned == call.hidden.numel(), block
            _, call = family.step(model, block, call)


def test_plans_are_shown(clip: Request):
    plan = plan_of(replace(clip, whole=1, fetches=1))
    console = Console(width=120, record=True, file=io.StringIO())
    show_plan(plan, console)
    shown = console.export_text()
    for words in ("features of all samples (device)", "read from experts", "fetched from the hub"):
        assert words in shown
    assert "of host memory" in one_line(plan)
    assert json.loads(json.dumps(plan.as_dict()))["read"] == plan.read


def test_runs_log_their_plan(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    suite = clip_suite()
    with caplog.at_level(logging.INFO, logger="fusion_bench_featcal"):
        plan = log_plan(suite.merged, FeatCalSettings(), 2, CPU)
        assert plan is not None and one_line(plan) in caplog.text
        monkeypatch.setattr(module, "free_bytes", lambda _: plan.needs[0].needed - 1)
        log_plan(suite.merged, FeatCalSettings(), 2, CPU)
        assert "method.batch_size" in caplog.text
        monkeypatch.setattr(module, "free_bytes", lambda _: 1)
        monkeypatch.setattr(module, "free_swap", lambda: 0)
        with pytest.raises(CalibrationError, match="nothing was calibrated"):
            log_plan(suite.merged, FeatCalSettings(), 2, CPU)
    suite = residual_suite()
    settings = FeatCalSettings(family={"name": "replay", "blocks": suite.blocks})
    assert log_plan(suite.merged, settings, 2, CPU) is None


PUBLISHED = {
    "flan-t5-base": (247_577_856, [12, 12], "t5"),
    "flan-t5-large": (783_150_080, [24, 24], "t5"),
    "Llama-3.2-3B-Instruct": (3_212_749_824, [28], "llama"),
    "Llama-3.1-8B-Instruct": (8_030_261_248, [32], "llama"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_blocks_are_the_published_ones(name: str):
    model = empty_model(f"someone/{name}")
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    shapes = Shapes.of(Request(model, FeatCalSettings(), tasks=3))
    blocks = [len(stage) for stage in shapes.stages]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert (parameters, blocks, shapes.family.name) == PUBLISHED[name]


def test_memory_of_a_llama_and_features_of_flan_t5():
    settings = FeatCalSettings(samples_per_task=10, batch_size=10)
    model = empty_model("Llama-3.2-3B-Instruct")
    parts = plan_of(Request(model, settings, tasks=3, length=100)).parts
    assert parts["model"] == 2 * 3_212_749_824
    assert parts["features"] == 2 * 2 * 3 * 10 * 100 * 3072
    assert parts["solve"] == 2 * 4 * 3072 * 2 * 8192
    request = run_request(["modelpool=flan-t5-base_glue", "method=featcal/paper_flan_t5"])
    settings, batches = request.settings, 8 * 256 / request.settings.batch_size
    hidden, bias = 2 * 8 * 256 * 512 * 768 * 4, 2 * batches * 12 * 512**2 * 4
    assert (request.tasks, settings.samples_per_task) == (8, 256)
    assert hidden + bias <= plan_of(request).parts["features"] < 1.02 * (hidden + bias)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "opt", "falcon", "bert", "modernbert", "vit"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # transformers' own modules
def test_class_of_a_configuration_is_the_one_that_it_names(name: str, tmp_path: Path):
    make: Any = next(row for row in ROWS if row.name == name).make
    model = make()[0]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    assert type(empty_model(str(tmp_path))) is type(model)
    model.config.architectures = None
    model.config.save_pretrained(tmp_path)
    causal = transformers.AutoModelForCausalLM._model_mapping
    is_causal = name != "vit" and type(model.config) in causal
    mapping = causal if is_causal else transformers.AutoModel._model_mapping
    assert type(empty_model(str(tmp_path))) is mapping[type(model.config)]
